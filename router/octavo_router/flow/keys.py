"""API keys: which there are, as SHA-256, and what each may do. keys_file reads files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from octavo_router.config.settings import KeyConfig

_HEX = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What the owner of a key may do; 0 and empty: anything."""

    tenant: str
    requests_per_s: float = 0.0
    tokens_per_min: float = 0.0
    max_in_flight: int = 0
    weight: float = 1.0
    priority: int = 0
    models: frozenset[str] = frozenset()
    is_trusted: bool = False
    owner: str = ""  # of what engines keep for it; "": everybody's
    cache_salt: str = ""  # that its prompts' KV cache is kept under; "": everybody's


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Limits by the SHA-256 of the key. The keys themselves are forgotten."""

    limits: Mapping[bytes, KeyLimits] = field(default_factory=dict)
    is_required: bool = False  # whether a key is required; true with no keys lets nobody in


def make_table(
    keys: Iterable[KeyConfig],
    environment: Mapping[str, str],
    *,
    is_required: bool = False,
    salts_caches: bool = False,
) -> KeyTable:
    """The table for these settings; raises ConfigInvalid by the entries' places."""
    limits: dict[bytes, KeyLimits] = {}
    faults = []
    for number, entry in enumerate(keys):
        where = f"keys[{number}]"
        try:
            digest = _digest(entry, environment, where)
        except ConfigInvalid as error:
            faults.append(error)
            continue
        if digest in limits:
            faults.append(ConfigInvalid(where, "the same key is there twice"))
        tenant = entry.tenant or f"key-{digest.hex()[:8]}"
        limits[digest] = KeyLimits(
            tenant,
            entry.requests_per_s,
            entry.tokens_per_min,
            entry.max_in_flight,
            entry.weight,
            entry.priority,
            frozenset(entry.models),
            entry.trusted,
            digest_of("owner", tenant),
            digest_of("tenant", tenant) if salts_caches else "",
        )
    if faults:
        raise ConfigInvalid.of(faults)
    return KeyTable(limits, is_required or bool(limits))


def digest_of(purpose: str, tenant: str) -> str:
    """The same at every router, and no other tenant's."""
    return sha256(f"octavo {purpose}\0{tenant}".encode()).hexdigest()[:32]


def _digest(entry: KeyConfig, environment: Mapping[str, str], where: str) -> bytes:
    given = [name for name in ("key", "key_env", "sha256") if getattr(entry, name)]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ConfigInvalid(where, f"give one of key, key_env and sha256; got {found}")
    if entry.sha256:
        if not _HEX.fullmatch(entry.sha256):
            raise ConfigInvalid(f"{where}.sha256", "must be 64 hexadecimal digits")
        return bytes.fromhex(entry.sha256)
    key = entry.key or environment.get(entry.key_env, "")
    if not key:
        raise ConfigInvalid(f"{where}.key_env", f"the environment has no {entry.key_env}")
    return sha256(key.encode()).digest()
