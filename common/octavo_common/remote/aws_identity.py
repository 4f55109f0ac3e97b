"""Temporary keys of AWS for the pod's own ServiceAccount, by IRSA or EKS Pod Identity.

Both are the cluster's: a webhook sets the variables. A machine's own role is never used.
"""

from __future__ import annotations

import ipaddress
import re
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from octavo_common.remote.errors import FetchError, FetchReason, of_status
from octavo_common.remote.http import Http, json_object
from octavo_common.remote.sigv4 import AwsKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo_common.remote.credentials import Credentials

_EARLY_S = 300.0  # before they expire
_SESSION = "octavo-fetch"
# EKS' agent on each node; besides it only this machine may be contacted without TLS.
_AGENTS = frozenset(("169.254.170.23", "fd00:ec2::23"))


class PodKeys:
    """The key to sign with, renewed when it is about to expire; None where the pod has no
    identity. Safe to use from many threads."""

    def __init__(
        self,
        http: Http,
        credentials: Credentials,
        *,
        region: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._http = http
        self._environ = credentials.environ  # not the Secret: it must not set the address
        self._region = region
        self._clock = clock
        self._lock = threading.Lock()
        self._key: AwsKey | None = None
        self._expires_at = 0.0

    def __call__(self) -> AwsKey | None:
        with self._lock:
            if self._clock() >= self._expires_at - _EARLY_S:
                self._key, self._expires_at = self._ask()
            return self._key

    def _ask(self) -> tuple[AwsKey | None, float]:
        role = self._environ.get("AWS_ROLE_ARN", "")
        if role and (path := self._environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")):
            return self._assume(role, _read(path))
        if uri := self._environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", ""):
            return self._of_agent(uri)
        return None, float("inf")

    def _assume(self, role: str, token: str) -> tuple[AwsKey, float]:
        """IRSA: the ServiceAccount's token for the role's keys."""
        default = f"https://sts.{self._region}.amazonaws.com"
        url = f"{self._environ.get('AWS_ENDPOINT_URL_STS', default).rstrip('/')}/"
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": role,
            "RoleSessionName": _SESSION,
            "WebIdentityToken": token,
        }
        headers = {"content-type": "application/x-www-form-urlencoded"}
        with self._http.open(
            url, method="POST", body=urlencode(form).encode(), headers=headers
        ) as answer:
            text = answer.text().decode(errors="replace")
            status, after_s = answer.status, answer.retry_after_s
        if status in (400, 403):
            said = _element(text, "Message") or str(status)
            raise FetchError(FetchReason.UNAUTHORIZED, f"AWS refuses the role {role}: {said[:300]}")
        if status != 200:
            raise of_status(status, url, after_s=after_s)
        names = {"AccessKeyId": "AccessKeyId", "SecretAccessKey": "SecretAccessKey",
                 "Token": "SessionToken", "Expiration": "Expiration"}  # fmt: skip
        return _key({ours: _element(text, theirs) for ours, theirs in names.items()}, url)

    def _of_agent(self, uri: str) -> tuple[AwsKey, float]:
        """EKS Pod Identity: the node's agent has the keys."""
        if not _may_ask(uri):
            raise FetchError(
                FetchReason.UNAUTHORIZED,
                f"AWS_CONTAINER_CREDENTIALS_FULL_URI names {uri[:200]}, which is not EKS' agent",
            )
        path = self._environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "")
        token = _read(path) if path else ""
        http = Http(stall_s=5.0, environ={}, allow_link_local=True)
        shown = {"authorization": token} if token else {}
        with http.open(uri, sign=lambda method, url, headers: shown) as answer:
            if answer.status == 200:
                return _key(json_object(answer.text(), uri), uri)
            raise FetchError(
                FetchReason.UNAUTHORIZED,
                f"EKS' Pod Identity agent refuses ({answer.status}); associate a role with the "
                "pod's ServiceAccount",
            )


def _key(answer: Mapping[str, object], where: str) -> tuple[AwsKey, float]:
    key_id, secret, token, expiration = (
        str(answer.get(name) or "")
        for name in ("AccessKeyId", "SecretAccessKey", "Token", "Expiration")
    )
    if not key_id or not secret:
        raise FetchError(FetchReason.UNAUTHORIZED, f"{where} gave no keys")
    try:
        expires_at = datetime.fromisoformat(expiration).timestamp()
    except ValueError:
        raise FetchError(FetchReason.UNAUTHORIZED, f"{where} gave keys without their end") from None
    return AwsKey(key_id, secret, token), expires_at


def _may_ask(uri: str) -> bool:
    parts = urlsplit(uri)
    if parts.scheme == "https" or parts.hostname in _AGENTS:
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise FetchError(FetchReason.UNAUTHORIZED, f"{path}: {error.strerror}") from None


def _element(text: str, name: str) -> str:
    """Of an answer that is small and flat: no XML parser is needed."""
    match = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return match[1] if match else ""
