"""Upstream URLs into addresses, with an error that says what to write instead."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from octavo_router.endpoints.endpoint import Address
from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_router.config.settings import UpstreamConfig

_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")
SRV_PREFIX = "_"  # a host such as _http._tcp.engines.default.svc: its records name the ports


def address_of(upstream: UpstreamConfig, *, field: str = "discovery.upstreams") -> Address:
    """Raises ConfigInvalid. The host may be a name still."""
    url = upstream.url.strip()
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigInvalid(field, f"{upstream.url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigInvalid(field, f"{upstream.url!r} must begin with http:// or https://")
    if not parts.hostname:
        raise ConfigInvalid(field, f"{upstream.url!r} names no host")
    if parts.username or parts.password:
        raise ConfigInvalid(field, "a URL cannot carry a password; set the upstream key instead")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    if not _PREFIX.fullmatch(prefix) or ".." in prefix or parts.query or parts.fragment:
        problem = "must end after host and port, or after a path such as /openai/v1"
        raise ConfigInvalid(field, f"{upstream.url!r} {problem}")
    is_tls = parts.scheme == "https"
    if is_tls and (upstream.is_dns or parts.hostname.startswith(SRV_PREFIX)):
        problem = "certificates name hosts, so list each https engine by its own name"
        raise ConfigInvalid(field, f"{upstream.url!r}: {problem}")
    return Address(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix)


def key_of(upstream: UpstreamConfig, environment: Mapping[str, str], *, field: str) -> str:
    """Raises ConfigInvalid."""
    if upstream.key and upstream.key_env:
        raise ConfigInvalid(field, "give one of key and key_env")
    key = (upstream.key or environment.get(upstream.key_env, "")).strip()
    if upstream.key_env and not key:
        raise ConfigInvalid(f"{field}.key_env", f"the environment has no {upstream.key_env}")
    if not key.isprintable() or not key.isascii():
        raise ConfigInvalid(f"{field}.key", "must be of printable ASCII characters")
    return key


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
