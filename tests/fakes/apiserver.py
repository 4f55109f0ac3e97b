"""A real kube-apiserver with etcd behind it: no controllers, no nodes, up in about three seconds.

Nothing here runs pods: a Deployment stays as it was written, and tests play the controllers.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import yaml

from tests.apiserver import build
from tests.fakes.quick_yaml import read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CRD_FILE = Path(__file__).parents[2] / "crds" / "llmdeployments.octavo.dev.yaml"
ADAPTER_CRD_FILE = CRD_FILE.with_name("llmadapters.octavo.dev.yaml")
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
_START_TIMEOUT_S = 180.0  # on a machine that does much else
_START_ATTEMPTS = 3


class ApiError(Exception):
    """The server's Status object, for tests that expect a refusal."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {body.get('reason', '')}: {body.get('message', body)}")
        self.status = status
        self.body = body
        self.message = str(body.get("message", body))


class ProcessEnded(Exception):
    """etcd or the API server ended while its start was awaited."""


class ApiServer:
    """One API server and its etcd, in a folder of their own.

        with ApiServer.start() as server:
            server.install(CRD_FILE)
            server.create({"apiVersion": "v1", "kind": "Namespace", ...})

    For other clients: `url`, `token`, `ca_file`, `kubeconfig`. The token is that of a cluster
    administrator; `user_token` is that of a user without rights, named `user`, to whom tests give
    what they want to prove enough.
    """

    user = "octavo-operator"

    def __init__(
        self,
        folder: Path,
        port: int,
        processes: list[subprocess.Popen[bytes]],
        command: list[str],
    ) -> None:
        self.folder = folder
        self._command = command  # of the API server
        self.url = f"https://127.0.0.1:{port}"
        self.token = (folder / "admin.token").read_text()
        self.user_token = (folder / "user.token").read_text()
        self.ca_file = folder / "certs" / "apiserver.crt"
        self.kubeconfig = folder / "kubeconfig"
        self._processes = processes
        self._client: httpx.Client | None = None
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}
        self.warnings: list[str] = []  # of all answers so far; clear it before what you look at

    @classmethod
    def start(cls, *, flags: tuple[str, ...] = ()) -> Self:
        """Starts both and waits until the API is ready. `flags`: more of kube-apiserver's.

        A port that was free when it was chosen may be taken before its server listens: a process
        that ended is a reason to try with other ports.
        """
        for _ in range(_START_ATTEMPTS - 1):
            with contextlib.suppress(ProcessEnded):
                return cls._start_once(flags)
        return cls._start_once(flags)

    @classmethod
    def _start_once(cls, flags: tuple[str, ...]) -> Self:
        etcd, apiserver = build.commands()
        folder = Path(tempfile.mkdtemp(prefix="octavo-apiserver-"))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            etcd_port, peer_port, port = _free_ports(3)
            _write_secrets(folder)
            processes.append(
                _run(folder, "etcd", [*etcd, *_etcd_flags(folder, etcd_port, peer_port)])
            )
            command = [*apiserver, *_apiserver_flags(folder, etcd_port, port), *flags]
            processes.append(_run(folder, "kube-apiserver", command))
            server = cls(folder, port, processes, command)
            server.wait_until_ready()
            server._write_kubeconfig()
        except BaseException:
            _stop(processes)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return server

    def kill(self) -> None:
        """The API server alone; etcd keeps what it has."""
        _stop([self._processes.pop()])

    def start_again(self) -> None:
        """After `kill`, at the same port; then `wait_until_ready`."""
        # NOTE: in the main thread, for the server ends with the thread that started it.
        self._processes.append(_run(self.folder, "kube-apiserver", self._command))

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        _stop(self._processes)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- objects ----------------------------------------------------------------------------------

    def create(self, obj: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        return self.request("POST", self.path_of(obj, named=False), obj, **_dry(dry_run))

    def apply(
        self, obj: Mapping[str, Any], *, manager: str = "test", force: bool = True,
        dry_run: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Server-side apply."""
        query = {"fieldManager": manager, "force": str(force).lower(), **_dry(dry_run)}
        return self.request("PATCH", self.path_of(obj), obj, content_type=APPLY, **query)

    def get(self, obj: Mapping[str, Any]) -> dict[str, Any]:
        """The stored object with the identity of `obj`."""
        return self.request("GET", self.path_of(obj))

    def patch(
        self, obj: Mapping[str, Any], change: Mapping[str, Any], *, subresource: str = ""
    ) -> dict[str, Any]:
        """A merge patch; `subresource` is status or scale."""
        path = self.path_of(obj) + (f"/{subresource}" if subresource else "")
        return self.request("PATCH", path, change, content_type=MERGE)

    def delete(self, obj: Mapping[str, Any]) -> dict[str, Any]:
        return self.request("DELETE", self.path_of(obj))

    def list(self, api_version: str, kind: str, namespace: str = "") -> list[dict[str, Any]]:
        path = self.path_of(
            {"apiVersion": api_version, "kind": kind, "metadata": {"namespace": namespace}},
            named=False,
        )
        items: list[dict[str, Any]] = self.request("GET", path)["items"]
        return items

    def make_namespace(self, *, labels: Mapping[str, str] | None = None) -> str:
        """A new one, so that tests do not meet. Without controllers it is never emptied."""
        name = f"test-{secrets.token_hex(4)}"
        metadata = {"name": name, "labels": dict(labels or {})}
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        return name

    def install(self, crd_file: Path = CRD_FILE) -> None:
        """Applies a CRD and waits until it is served; one that is being deleted has to go first."""
        crd = read_yaml(crd_file.read_text())
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._is_going(crd):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{crd['metadata']['name']} is still being deleted")
            time.sleep(0.02)
        self.apply(crd, manager="install")
        while True:
            conditions = self.get(crd).get("status", {}).get("conditions") or []
            is_true = {c["type"] for c in conditions if c["status"] == "True"}
            if {"Established", "NamesAccepted"} <= is_true and self._serves(crd):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{crd['metadata']['name']} was not established: {conditions}")

    # --- requests ---------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        token: str = "",
        user: str = "",
        **query: str,
    ) -> dict[str, Any]:
        """One call; raises ApiError for 4xx and 5xx. Unknown fields are errors, not dropped."""
        if body is not None:
            query.setdefault("fieldValidation", "Strict")
        answer = self.client.request(
            method,
            path,
            params=query,
            json=body,
            headers={
                "Authorization": f"Bearer {token or self.token}",
                "Content-Type": content_type,
                **({"Impersonate-User": user} if user else {}),
            },
        )
        self.warnings += answer.headers.get_list("warning")
        try:
            content = answer.json()
        except ValueError:
            content = {"message": answer.text}
        if answer.status_code >= 400:
            raise ApiError(answer.status_code, content)
        return dict(content)

    def path_of(self, obj: Mapping[str, Any], *, named: bool = True) -> str:
        api_version, metadata = obj["apiVersion"], obj["metadata"]
        root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        plural, is_namespaced = self._resource(root, api_version, obj["kind"])
        namespace = metadata.get("namespace", "")
        path = f"{root}/namespaces/{namespace}" if is_namespaced and namespace else root
        return f"{path}/{plural}/{metadata['name']}" if named else f"{path}/{plural}"

    @property
    def client(self) -> httpx.Client:
        if self._client is None:
            import ssl

            self._client = httpx.Client(
                base_url=self.url,
                verify=ssl.create_default_context(cafile=str(self.ca_file)),
                timeout=120,
                trust_env=False,
            )
        return self._client

    def _resource(self, root: str, api_version: str, kind: str) -> tuple[str, bool]:
        key = (api_version, kind)
        if key not in self._resources:
            for resource in self.request("GET", root)["resources"]:
                if "/" not in resource["name"]:
                    found = (resource["name"], resource["namespaced"])
                    self._resources[api_version, resource["kind"]] = found
        return self._resources[key]

    def _is_going(self, obj: Mapping[str, Any]) -> bool:
        try:
            return "deletionTimestamp" in self.get(obj)["metadata"]
        except ApiError as error:
            if error.status == 404:
                return False
            raise

    def _serves(self, crd: Mapping[str, Any]) -> bool:
        spec = crd["spec"]
        version = spec["versions"][0]["name"]
        path = f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
        with contextlib.suppress(ApiError):  # established, and not yet routed: 404
            self.request("GET", path)
            return True
        return False

    # --- life -------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            for process in self._processes:
                if process.poll() is not None:
                    raise ProcessEnded(f"{process.args!r} ended: {self._last_words()}")
            if self.ca_file.exists():
                # Not up yet, or the certificate is half written.
                with contextlib.suppress(httpx.TransportError, OSError, ApiError):
                    self.request("GET", "/readyz")
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the API server was not ready in time: {self._last_words()}")
            time.sleep(0.05)

    def _last_words(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)

    def _write_kubeconfig(self) -> None:
        ca = b64encode(self.ca_file.read_bytes()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.url, "certificate-authority-data": ca},
                }
            ],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))


def _etcd_flags(folder: Path, port: int, peer_port: int) -> Iterator[str]:
    url, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    yield f"--data-dir={folder / 'etcd'}"
    yield "--unsafe-no-fsync"
    yield f"--listen-client-urls={url}"
    yield f"--advertise-client-urls={url}"
    yield f"--listen-peer-urls={peer}"
    yield f"--initial-advertise-peer-urls={peer}"
    yield f"--initial-cluster=default={peer}"
    yield "--log-level=warn"


def _apiserver_flags(folder: Path, etcd_port: int, port: int) -> Iterator[str]:
    yield f"--etcd-servers=http://127.0.0.1:{etcd_port}"
    yield "--bind-address=127.0.0.1"
    yield "--advertise-address=127.0.0.1"
    yield f"--secure-port={port}"
    yield f"--cert-dir={folder / 'certs'}"
    yield "--service-cluster-ip-range=10.96.0.0/16"
    yield "--service-account-issuer=https://kubernetes.default.svc"
    yield f"--service-account-key-file={folder / 'sa.key'}"
    yield f"--service-account-signing-key-file={folder / 'sa.key'}"
    yield f"--token-auth-file={folder / 'tokens.csv'}"
    yield "--authorization-mode=RBAC"
    # Nobody makes the `default` ServiceAccount here, and pods of tests need none.
    yield "--disable-admission-plugins=ServiceAccount"
    yield "--enable-priority-and-fairness=false"  # a second less to start
    yield "--endpoint-reconciler-type=none"


def _write_secrets(folder: Path) -> None:
    for name in ("admin", "user"):
        (folder / f"{name}.token").write_text(secrets.token_hex(16))
    admin, user = ((folder / f"{name}.token").read_text() for name in ("admin", "user"))
    (folder / "tokens.csv").write_text(
        f'{admin},admin,admin,"system:masters"\n{user},{ApiServer.user},{ApiServer.user}\n'
    )
    # A P-256 key in its shortest form; the server computes the public half.
    der = bytes.fromhex("30310201010420") + secrets.token_bytes(31).rjust(32, b"\1")
    der += bytes.fromhex("a00a06082a8648ce3d030107")
    pem = b64encode(der).decode()
    lines = [pem[i : i + 64] for i in range(0, len(pem), 64)]
    text = "\n".join(["-----BEGIN EC PRIVATE KEY-----", *lines, "-----END EC PRIVATE KEY-----", ""])
    (folder / "sa.key").write_text(text)


def _run(folder: Path, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    """Also when the test run is killed: no server is left behind."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}
