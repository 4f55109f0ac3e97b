"""Bodies as engines get them: without what only a trusted key may say, under the tenant's salt.

A client that names hosts, ranks or blocks of a KV cache would choose whom an engine connects to,
and read what others have left there. And one that is answered from the cache of others' prompts can
tell by the time that takes which prompts they were: under `flow.cache_scope: tenant` each tenant's
are kept apart by a salt, into which a client's own one goes too.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

import msgspec

from octavo_router.errors import Rejected
from octavo_router.residency.api import PRIVILEGED, PRIVILEGED_PREFIX

if TYPE_CHECKING:
    from octavo_router.flow.keys import KeyLimits
    from octavo_router.proxy.paths import ProxiedPath
    from octavo_router.residency.api import Scan

_SALT: Final = "cache_salt"
# Objects that are anybody's to send, but for the privileged fields inside of them.
_HOLDERS: Final[dict[str, tuple[str, ...]]] = {
    "vllm_xargs": (),
    "sampling_params": ("extra_args",),
}
_Fields = dict[str, msgspec.Raw]
_decoder = msgspec.json.Decoder(_Fields)


def for_engines(body: bytes, scan: Scan, limits: KeyLimits, path: ProxiedPath | None) -> bytes:
    """The very same body where nothing need be changed. Raises Rejected."""
    strips = scan.is_privileged and not limits.is_trusted
    salt = limits.cache_salt if path is None or path.salts else ""
    if not (strips or salt):
        return body
    try:
        fields = _decoder.decode(body)
        is_changed = strips and _strip(fields)
    except (ValueError, RecursionError):  # the scan has read it: this cannot be
        raise Rejected(400, "invalid_json", "The body is not valid JSON.") from None
    if salt:
        text = sha256(f"{salt}\0{scan.cache_salt}".encode()).hexdigest()[:32]
        fields[_SALT] = msgspec.Raw(b'"%b"' % text.encode())
        is_changed = True
    return msgspec.json.encode(fields) if is_changed else body


def _strip(fields: _Fields) -> bool:
    """Whether anything was there."""
    names = [name for name in fields if _is_privileged(name)]
    for name in names:
        del fields[name]
    is_changed = bool(names)
    for name, inner in _HOLDERS.items():
        if name in fields:
            is_changed = _strip_holder(fields, name, inner) or is_changed
    return is_changed


def _strip_holder(fields: _Fields, name: str, inner: tuple[str, ...]) -> bool:
    if not bytes(fields[name]).startswith(b"{"):
        return False  # the engine will say what is wrong with it
    held = _decoder.decode(fields[name])
    names = [each for each in held if _is_privileged(each)]
    for each in names:
        del held[each]
    is_changed = bool(names)
    for each in inner:
        if each in held:
            is_changed = _strip_holder(held, each, ()) or is_changed
    if is_changed:
        fields[name] = msgspec.Raw(msgspec.json.encode(held))
    return is_changed


def _is_privileged(name: str) -> bool:
    return name.startswith(PRIVILEGED_PREFIX) or (name in PRIVILEGED and name not in _HOLDERS)
