"""Who may look inside of the router: at /debug, its state, its metrics and how requests are placed.

    a listener of its own (server.admin_port)     all who reach it; with a key, who presents it
    server.admin_key                              who shows it, from anywhere
    neither                                       programs on this machine; /metrics is open

Besides, the keys that are `trusted`. A tenant's key is not enough: how an engine was chosen tells
which prompts others have sent.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import TYPE_CHECKING, Final

from octavo_router.errors import Rejected
from octavo_router.http.fields import ADMIN_KEY_HEADER
from octavo_router.http.loopback import is_made_here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_router.http.messages import Inbound

_HEADER: Final = ADMIN_KEY_HEADER.encode()
_CREDENTIALS: Final = frozenset((b"authorization", b"x-api-key"))


class AdminAccess:
    """The one place where this is decided. `is_trusted` knows the keys of tenants."""

    def __init__(
        self, key: str = "", *, is_trusted: Callable[[str], bool] = lambda credentials: False
    ) -> None:
        self._is_trusted = is_trusted
        self.replace_key(key)

    def replace_key(self, key: str) -> None:
        """From now on only this one opens what a key opens."""
        self._key = key.strip().encode()  # a Secret made of a file ends with its newline

    def is_known(self, request: Inbound) -> bool:
        """By a key, or by the listener that it came by."""
        return self._shows_key(request.headers.raw) or (request.is_admin and not self._key)

    def allows(self, request: Inbound) -> bool:
        return self.is_known(request) or self.allows_fields(request.client, request.headers.raw)

    def allows_fields(self, client: str, fields: Sequence[tuple[bytes, bytes]]) -> bool:
        """For a request of the usual listener; names are in lower case."""
        return self._shows_key(fields) or (not self._key and is_made_here(client, fields))

    def check(self, request: Inbound) -> None:
        """Raises Rejected."""
        if not self.allows(request):
            raise self.refusal(request.path)

    def check_scrape(self, request: Inbound) -> None:
        """Numbers without prompts and tenants' keys: open until there is a key for them."""
        if self._key:
            self.check(request)

    def refusal(self, what: str) -> Rejected:
        if self._key:
            return Rejected(
                403, "admin_key_required",
                f"{what} needs the router's admin key: send it as `{ADMIN_KEY_HEADER}`.",
            )  # fmt: skip
        return Rejected(
            403, "admin_key_required",
            f"{what} is for programs on the router's own machine: set server.admin_key or "
            "server.admin_port to open it to others.",
        )  # fmt: skip

    def _shows_key(self, fields: Sequence[tuple[bytes, bytes]]) -> bool:
        for name, value in fields:
            if name == _HEADER and self._is_key(value):
                return True
            if name in _CREDENTIALS:
                scheme, _, rest = value.partition(b" ")
                shown = rest.strip() if scheme.lower() == b"bearer" else value.strip()
                if self._is_key(shown) or self._is_trusted(value.decode("latin-1")):
                    return True
        return False

    def _is_key(self, shown: bytes) -> bool:
        return bool(self._key) and compare_digest(shown, self._key)
