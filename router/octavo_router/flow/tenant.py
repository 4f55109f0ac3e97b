"""Tenants: who may come in, and what each may still do now."""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING

from octavo_router.errors import Rejected
from octavo_router.flow.buckets import Bucket
from octavo_router.flow.keys import KeyLimits, KeyTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.routing.request import RouteRequest

MAX_ANONYMOUS = 1000  # tenants known by a header only; the rest share a name
OTHERS = "other"


class Tenant:
    """One key's owner, with what it has in flight and what its buckets hold."""

    __slots__ = (
        "digest", "in_flight", "is_free", "is_revoked", "limits", "name", "requests", "tokens",
    )  # fmt: skip

    def __init__(self, name: str, limits: KeyLimits, now: float, digest: bytes = b"") -> None:
        self.name = name
        self.digest = digest  # of its key
        self.in_flight = 0  # requests, waiting ones included
        self.is_free = True
        self.is_revoked = False  # its key is gone; what runs may be ended
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.limits = limits
        self.change_limits(limits, now, is_new=True)

    def change_limits(self, limits: KeyLimits, now: float, *, is_new: bool = False) -> None:
        """New limits begin with full buckets, unchanged ones keep theirs."""
        if is_new or limits.requests_per_s != self.limits.requests_per_s:
            rate = limits.requests_per_s
            self.requests = Bucket(rate, max(1.0, rate), now) if rate else None
        if is_new or limits.tokens_per_min != self.limits.tokens_per_min:
            rate = limits.tokens_per_min
            self.tokens = Bucket(rate / 60.0, rate, now) if rate else None
        self.limits = limits
        # Its requests meet no checks and are not changed: they need only be counted.
        is_rated = self.requests is not None or self.tokens is not None
        is_special = limits.is_trusted or bool(limits.cache_salt)
        self.is_free = not (limits.models or limits.max_in_flight or is_rated or is_special)

    def enter(self, request: RouteRequest, tokens: float, now: float) -> None:
        """Count a request in, or refuse it: its own limits are exceeded. All or nothing."""
        limits = self.limits
        if limits.models and request.model not in limits.models:
            raise Rejected(
                403,
                "model_not_allowed",
                "The API key is not allowed to use this model.",
                param="model",
            )
        if 0 < limits.max_in_flight <= self.in_flight:
            raise Rejected(
                429,
                "too_many_in_flight",
                f"The API key is limited to {limits.max_in_flight} requests in flight.",
                retry_after_s=1.0,
            )
        if self.requests is not None and (wait_s := self.requests.wait_s(1.0, now)) > 0.0:
            raise Rejected(
                429,
                "request_rate_exceeded",
                f"The API key is limited to {limits.requests_per_s:g} requests per second.",
                retry_after_s=wait_s,
            )
        if self.tokens is not None:
            if (wait_s := self.tokens.wait_s(tokens, now)) > 0.0:
                raise Rejected(
                    429,
                    "token_rate_exceeded",
                    f"The API key is limited to {limits.tokens_per_min:g} tokens per minute.",
                    retry_after_s=wait_s,
                )
            self.tokens.take(tokens, now)
        if self.requests is not None:
            self.requests.take(1.0, now)
        self.in_flight += 1

    def leave(self, estimated_tokens: float, used_tokens: float, now: float) -> None:
        self.in_flight -= 1
        if self.tokens is not None:
            self.tokens.give_back(estimated_tokens - used_tokens, now)


class Tenants:
    """All tenants, by the digest of their key."""

    __slots__ = ("_anonymous", "_by_digest", "_clock", "table")

    def __init__(self, table: KeyTable, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_digest: dict[bytes, Tenant] = {}
        self._anonymous: dict[str, Tenant] = {}
        self.table = KeyTable({})
        self.replace(table)

    def replace(self, table: KeyTable) -> None:
        """These are the keys now. Tenants that stay keep what they have used."""
        now = self._clock()
        for digest in self._by_digest.keys() - table.limits.keys():
            self._by_digest.pop(digest).is_revoked = True
        for digest, limits in table.limits.items():
            known = self._by_digest.get(digest)
            if known is None or known.name != limits.tenant:
                if known is not None:
                    known.is_revoked = True
                self._by_digest[digest] = Tenant(limits.tenant, limits, now, digest)
            else:
                known.change_limits(limits, now)
        self.table = table

    def authenticate(self, authorization: str = "", hint: str = "", /) -> Tenant:
        """Whose key it is: "Bearer KEY", or the key alone. Rejected 401 otherwise.

        Where no keys are required, `hint` (a header) names the tenant.
        """
        if not self.table.is_required:
            return self._anonymous.get(hint) or self._nameless(hint)
        scheme, _, rest = authorization.partition(" ")
        key = rest.strip() if scheme.lower() == "bearer" else authorization.strip()
        if not key:
            raise Rejected(
                401, "missing_api_key", "An API key is required: send `Authorization: Bearer KEY`."
            )
        digest = sha256(key.encode("utf-8", "surrogatepass")).digest()
        # Looked up by digest: no client can choose digests, so the time it takes reveals nothing of
        # the keys. The whole is then compared in constant time.
        tenant = self._by_digest.get(digest)
        if tenant is not None and compare_digest(tenant.digest, digest):
            return tenant
        raise Rejected(401, "invalid_api_key", "The API key is not valid.")

    def is_trusted(self, authorization: str) -> bool:
        """A key of ours that may do more than ask. Where no keys are required, nobody's is."""
        try:
            return self.authenticate(authorization).limits.is_trusted
        except Rejected:
            return False

    def _nameless(self, hint: str) -> Tenant:
        name = hint[:128]
        tenant = self._anonymous.get(name)
        if tenant is None:
            if len(self._anonymous) >= MAX_ANONYMOUS:
                name = OTHERS
            tenant = self._anonymous.setdefault(name, Tenant(name, KeyLimits(name), self._clock()))
        return tenant
