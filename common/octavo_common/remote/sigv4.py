"""AWS Signature Version 4, as its specification's own examples test it."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class AwsKey:
    """An access key, and the session token of a temporary one."""

    id: str
    secret: str
    token: str = ""


def signed_headers(
    key: AwsKey,
    method: str,
    url: str,
    headers: Mapping[str, str],
    *,
    region: str,
    service: str,
    now: datetime,
    payload_sha256: str = EMPTY_SHA256,
) -> dict[str, str]:
    """Those to add to `headers`. `now` is in UTC. The path of `url` is encoded once already."""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    own = {"host": _host(url), "x-amz-date": stamp}
    if service == "s3":
        own["x-amz-content-sha256"] = payload_sha256
    if key.token:
        own["x-amz-security-token"] = key.token
    # Ours and what the specification wants signed; proxies may change the others.
    signed = own | {
        name.lower(): value
        for name, value in headers.items()
        if name.lower().startswith("x-amz-") or name.lower() == "range"
    }
    names = ";".join(sorted(signed))
    request = canonical_request(method, url, signed, payload_sha256)
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"{ALGORITHM}\n{stamp}\n{scope}\n{digest}"
    signature = hmac.new(
        _signing_key(key.secret, stamp[:8], region, service), text.encode(), hashlib.sha256
    ).hexdigest()
    own["authorization"] = (
        f"{ALGORITHM} Credential={key.id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return own


def canonical_request(
    method: str, url: str, headers: Mapping[str, str], payload_sha256: str
) -> str:
    parts = urlsplit(url)
    query = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
    )
    lines = [f"{name}:{' '.join(headers[name].split())}" for name in sorted(headers)]
    return "\n".join(
        (
            method,
            parts.path or "/",
            "&".join(f"{name}={value}" for name, value in query),
            *lines,
            "",
            ";".join(sorted(headers)),
            payload_sha256,
        )
    )


def _signing_key(secret: str, date: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key


def _host(url: str) -> str:
    """As the Host header says it: without the scheme's own port."""
    parts = urlsplit(url)
    is_default = parts.port in (None, {"http": 80, "https": 443}.get(parts.scheme))
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if is_default else f"{host}:{parts.port}"
