"""A registry of images that takes pushes, as strict about digests as a real one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

BASIC = "Basic " + base64.b64encode(b"user:pass").decode()


@dataclass
class ImageRegistry:
    """`wants`: "", "basic" or "bearer". `failures`: uploads that break off first."""

    wants: str = ""
    failures: int = 0
    alters_manifests: bool = False
    host: str = ""
    blobs: dict[tuple[str, str], bytes] = field(default_factory=dict)  # by repository and digest
    manifests: dict[tuple[str, str], bytes] = field(default_factory=dict)  # by tag and by digest
    log: list[str] = field(default_factory=list)

    def may(self, authorization: str, repository: str) -> bool:
        if not self.wants:
            return True
        return authorization == (BASIC if self.wants == "basic" else f"Bearer {repository}")


@contextmanager
def serving(registry: ImageRegistry) -> Iterator[ImageRegistry]:
    class Handler(_Handler):
        store = registry

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry.host = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    store: ImageRegistry

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    do_GET = do_POST = do_PUT = do_HEAD

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if url.path == "/token":
            match = re.fullmatch(r"repository:(.+):pull,push", query["scope"])
            is_known = match and self.headers.get("authorization") == BASIC
            token = json.dumps({"token": match[1] if match else ""}).encode()
            return self._send(200 if is_known else 401, token)
        match = re.fullmatch(r"/v2/(.+)/(blobs/uploads/\d*|blobs/.+|manifests/.+)", url.path)
        if match is None:
            return self._send(404)
        repository, rest = match[1], match[2]
        self.store.log.append(f"{self.command} {repository}/{rest.partition(':')[0]}")
        if not self.store.may(self.headers.get("authorization", ""), repository):
            realm = f"http://{self.store.host}/token"
            bearer = f'Bearer realm="{realm}",service="registry",scope="repository:x:pull"'
            challenge = bearer if self.store.wants == "bearer" else 'Basic realm="registry"'
            return self._send(401, headers={"www-authenticate": challenge})
        if rest.startswith("blobs/uploads/"):
            return self._upload(repository, query, body)
        if rest.startswith("blobs/"):
            found = self.store.blobs.get((repository, rest.removeprefix("blobs/")))
            return self._send(404 if found is None else 200, found or b"")
        return self._manifest(repository, rest.removeprefix("manifests/"), body)

    def _upload(self, repository: str, query: dict[str, str], body: bytes) -> None:
        if self.command == "POST":
            source = self.store.blobs.get((query.get("from", ""), query.get("mount", "")))
            if source is not None:
                self.store.blobs[repository, query["mount"]] = source
                return self._send(201)
            place = f"/v2/{repository}/blobs/uploads/7?state=open"
            return self._send(202, headers={"location": place})
        if self.store.failures:
            self.store.failures -= 1
            return self._send(503)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if query.get("digest") != digest or query.get("state") != "open":
            return self._send(400, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
        self.store.blobs[repository, digest] = body
        return self._send(201)

    def _manifest(self, repository: str, reference: str, body: bytes) -> None:
        if self.command != "PUT":
            found = self.store.manifests.get((repository, reference))
            if found is not None:  # as Docker's own: it would have to convert it
                kind = json.loads(found)["mediaType"]
                found = found if kind in self.headers.get("accept", "") else None
            return self._send(404 if found is None else 200, found or b"")
        document = json.loads(body)
        for image in document.get("manifests", []):
            if (repository, image["digest"]) not in self.store.manifests:
                return self._send(400, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')
        for part in (document["config"], *document["layers"]) if "config" in document else ():
            if (repository, part["digest"]) not in self.store.blobs:
                return self._send(400, b'{"errors": [{"code": "MANIFEST_BLOB_UNKNOWN"}]}')
        if self.store.alters_manifests:
            body += b"\n"
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        self.store.manifests[repository, reference] = body
        self.store.manifests[repository, digest] = body
        return self._send(201, headers={"docker-content-digest": digest})

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
