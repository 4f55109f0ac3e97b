"""Access tokens of Google Cloud: by a service account's key, a user's, or the machine's account."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from octavo.fetch.errors import FetchError, FetchReason, Passing, of_status
from octavo_common.remote.http import Http, json_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_common.remote.credentials import Credentials

SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_TOKEN_URI = "https://oauth2.googleapis.com/token"
_METADATA_HOST = "metadata.google.internal"
_EARLY_S = 120.0  # before it expires
_METADATA_WAIT_S = 3.0  # outside of Google's cloud nothing answers
# DigestInfo of SHA-256, before the digest (RFC 8017, 9.2).
_SHA256_INFO = bytes.fromhex("3031300d060960864801650304020105000420")


class GoogleToken:
    """Asks for a token when one is needed; '' where there are no credentials at all."""

    def __init__(
        self, http: Http, credentials: Credentials, clock: Callable[[], float] = time.time
    ) -> None:
        self._http = http
        self._credentials = credentials
        self._clock = clock
        self._token = ""
        self._expires_at = 0.0
        self._is_anonymous = False

    def __call__(self) -> str:
        if not self._is_anonymous and self._clock() >= self._expires_at - _EARLY_S:
            answer = self._ask()
            self._is_anonymous = not answer
            self._token = str(answer.get("access_token", ""))
            self._expires_at = self._clock() + float(answer.get("expires_in", 3600))
        return self._token

    def _ask(self) -> dict[str, Any]:
        key = self._key()
        if key is None:
            return self._of_machine()
        match key.get("type"):
            case "service_account":
                form = {
                    "grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer",
                    "assertion": assertion(key, now=int(self._clock())),
                }
            case "authorized_user":
                names = ("client_id", "client_secret", "refresh_token")
                form = {"grant_type": "refresh_token"} | {n: str(key.get(n, "")) for n in names}
            case other:
                raise FetchError(
                    FetchReason.UNAUTHORIZED,
                    f"credentials of type {other!r} are not supported; use a service account's key",
                )
        uri = str(key.get("token_uri") or _TOKEN_URI)
        headers = {"content-type": "application/x-www-form-urlencoded"}
        with self._http.open(
            uri, method="POST", body=urlencode(form).encode(), headers=headers
        ) as answer:
            if answer.status == 200:
                return json_object(answer.text(), uri)
            if answer.status in (400, 401, 403):
                raise FetchError(
                    FetchReason.UNAUTHORIZED,
                    f"Google refuses the credentials ({answer.status}); check that the key of "
                    f"{key.get('client_email', 'this account')} is still valid",
                )
            raise of_status(answer.status, uri, after_s=answer.retry_after_s)

    def _key(self) -> dict[str, Any] | None:
        named = self._credentials.get("GOOGLE_APPLICATION_CREDENTIALS")
        if named.startswith("{"):  # a Secret's key that holds the file itself
            return json_object(named.encode(), "GOOGLE_APPLICATION_CREDENTIALS")
        paths = [Path(named)] if named else self._credentials.json_files()
        for path in paths:
            try:
                key = json_object(path.read_bytes(), str(path))
            except OSError as error:
                raise FetchError(
                    FetchReason.UNAUTHORIZED,
                    f"GOOGLE_APPLICATION_CREDENTIALS: {path}: {error.strerror}",
                ) from None
            if named or key.get("type") in ("service_account", "authorized_user"):
                return key
        return None

    def _of_machine(self) -> dict[str, Any]:
        environ = self._credentials.environ
        host = environ.get("GCE_METADATA_HOST", _METADATA_HOST)
        # The one link-local address that is contacted; users cannot set it.
        http = Http(stall_s=_METADATA_WAIT_S, environ={}, allow_link_local=True)
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        try:
            with http.open(url, headers={"metadata-flavor": "Google"}) as answer:
                return json_object(answer.text(), url) if answer.status == 200 else {}
        except Passing:
            return {}


def assertion(key: dict[str, Any], *, now: int) -> str:
    """The signed JWT by which a service account proves itself. Raises FetchError."""
    email, pem = key.get("client_email"), key.get("private_key")
    if not isinstance(email, str) or not isinstance(pem, str):
        raise FetchError(
            FetchReason.UNAUTHORIZED,
            "the service account's file has no client_email or private_key",
        )
    claims = {
        "iss": email,
        "scope": SCOPE,
        "aud": str(key.get("token_uri") or _TOKEN_URI),
        "iat": now,
        "exp": now + 3600,
    }
    head = {"alg": "RS256", "typ": "JWT"}
    text = b".".join(_encode(json.dumps(part).encode()) for part in (head, claims))
    try:
        signature = sign_rs256(pem, text)
    except (ValueError, IndexError):
        raise FetchError(
            FetchReason.UNAUTHORIZED, f"the private_key of {email} is not an RSA key in PKCS #8"
        ) from None
    return b".".join((text, _encode(signature))).decode()


def sign_rs256(pem: str, message: bytes) -> bytes:
    """RSASSA-PKCS1-v1_5 with SHA-256. Raises ValueError or IndexError for what is no key.

    NOTE: not constant in time. It signs once an hour, on the machine that holds the key.
    """
    modulus, exponent = _private_key(pem)
    size = (modulus.bit_length() + 7) // 8
    info = _SHA256_INFO + hashlib.sha256(message).digest()
    if size < len(info) + 11:
        raise ValueError("the key is too short")
    padded = b"\x00\x01" + b"\xff" * (size - len(info) - 3) + b"\x00" + info
    return pow(int.from_bytes(padded, "big"), exponent, modulus).to_bytes(size, "big")


def _private_key(pem: str) -> tuple[int, int]:
    """Modulus and private exponent out of PKCS #8, or the older PKCS #1."""
    lines = [line.strip() for line in pem.strip().splitlines()]
    der = base64.b64decode("".join(line for line in lines if not line.startswith("-----")))
    outer = _items(_value(der, 0x30))
    if len(outer) == 3 and outer[2][0] == 0x04:  # PrivateKeyInfo wraps the key
        outer = _items(_value(outer[2][1], 0x30))
    numbers = [int.from_bytes(value, "big") for tag, value in outer if tag == 0x02]
    if len(numbers) < 4 or numbers[1] < 2:
        raise ValueError("not an RSA key")
    return numbers[1], numbers[3]


def _value(der: bytes, tag: int) -> bytes:
    items = _items(der)
    if not items or items[0][0] != tag:
        raise ValueError("not the expected structure")
    return items[0][1]


def _items(der: bytes) -> list[tuple[int, bytes]]:
    """Tags and contents of a run of DER values."""
    items, at = [], 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            count = length & 0x7F
            if not 1 <= count <= 4:
                raise ValueError("a length that DER does not have")
            length = int.from_bytes(der[at : at + count], "big")
            at += count
        if at + length > len(der):
            raise ValueError("cut off")
        items.append((tag, der[at : at + length]))
        at += length
    return items


def _encode(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")
