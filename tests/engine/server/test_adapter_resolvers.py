"""Adapters that a request names and nobody loaded: found in a folder or by a package's function."""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from huggingface_hub import constants

from octavo_engine.errors import ConfigError
from octavo_engine.server import adapter_resolvers
from octavo_engine.server.adapter_resolvers import (
    LISTED_S,
    FolderResolver,
    HubResolver,
    make_resolvers,
)
from octavo_engine.server.settings import ServerSettings
from tests.fakes.adapters import write_adapter
from tests.fakes.simulated import CONFIG, Simulated, simulating

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LORA = CONFIG.replace(enable_lora=True, max_loras=2, max_cpu_loras=3)
MODULES = {"model.layers.0.self_attn.q_proj": (16, 16)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "adapters"
    for seed, name in enumerate(["sql", "team/legal"]):
        write_adapter(root / name, MODULES, seed=seed)
    write_adapter(tmp_path / "outside", MODULES, seed=9)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    (root / "empty").mkdir()
    write_adapter(root / ".hidden", MODULES, seed=8)
    return root


@pytest.fixture
def server(root: Path) -> Iterator[Simulated]:
    with simulating(LORA, ServerSettings(lora_resolver_dir=str(root))) as server:
        yield server
        server.check_idle()


def ask(server: Simulated, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def names(server: Simulated) -> list[str]:
    data = httpx.get(f"{server.url}/v1/models").json()["data"]
    return [card["id"] for card in data if card["parent"]]


def with_package(monkeypatch: pytest.MonkeyPatch, find: Callable[[str], str | None]) -> None:
    """As if a package registered `find` as `hub`."""

    class Point(EntryPoint):
        def load(self) -> Any:
            return find

    point = Point("hub", "somewhere:find", adapter_resolvers.GROUP)
    monkeypatch.setattr(adapter_resolvers, "entry_points", lambda group: [point])


def test_a_request_may_name_what_lies_in_the_folder(server: Simulated) -> None:
    assert names(server) == []
    assert ask(server, "sql").json()["model"] == "sql"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="team/legal", messages=messages, max_tokens=4)
    assert answer.model == "team/legal"
    assert names(server) == ["sql", "team/legal"]
    assert ask(server, "sql").status_code == 200


NOT_THERE = [
    "", ".", "..", "../outside", "sql/../sql", "link", "loop", "empty", ".hidden", "sql/", "/etc",
    "team", "sql\0", "a" * 256, "a" * 300, "a/" * 120 + "a", "SQL", "sql\n", "team//legal",
]  # fmt: skip


def test_nothing_else_is_found(server: Simulated) -> None:
    for name in NOT_THERE:
        response = ask(server, name)
        assert response.status_code == 404, (name, response.text)
    assert names(server) == []


def test_absolute_paths_are_not_names(root: Path) -> None:
    assert FolderResolver(str(root))(str(root / "sql")) is None
    assert FolderResolver(str(root))("sql") == str(root / "sql")


def test_an_adapter_that_does_not_fit_is_refused_with_its_reason(
    server: Simulated, root: Path
) -> None:
    (root / "sql" / "adapter_model.safetensors").write_bytes(b"torn")
    response = ask(server, "sql")
    assert response.status_code == 400
    assert "adapter_model.safetensors" in response.json()["error"]["message"]
    write_adapter(root / "sql", MODULES, seed=3)
    assert ask(server, "sql").status_code == 200


def test_requests_for_one_name_share_a_search(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    may_end = threading.Event()

    def find(name: str) -> str | None:
        searched.append(name)
        may_end.wait(10)
        return str(root / "sql") if name == "from-the-hub" else None

    with_package(monkeypatch, find)
    settings = ServerSettings(lora_resolver_dir=str(root), lora_resolvers=("hub",))
    with simulating(LORA, settings) as server, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, server, "from-the-hub") for _ in range(6)]
        assert ask(server, "sql").status_code == 200  # is in the folder, and waits for nobody
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": "from-the-hub", "prompt": "hello"}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.2)
        may_end.set()
        assert {answer.result().status_code for answer in answers} == {200}
        assert searched == ["from-the-hub"]
        assert ask(server, "unknown").status_code == 404
        assert searched == ["from-the-hub", "unknown"]
        server.check_idle()


def test_a_resolver_that_fails_is_no_unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str | None:
        raise OSError("the hub is away: secret-token")

    with_package(monkeypatch, find)
    with simulating(LORA, ServerSettings(lora_resolvers=("hub",))) as server:
        response = ask(server, "any")
    assert response.status_code == 500
    assert "its resolver failed" in response.text
    assert "secret-token" not in response.text


def test_what_is_wrong_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora-resolver-dir must be a folder"):
        ServerSettings(lora_resolver_dir=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="--lora-resolver-dir needs --enable-lora"):
        make_resolvers(ServerSettings(lora_resolver_dir=str(tmp_path)), takes_adapters=False)
    with pytest.raises(ConfigError, match="hub: no package has it; installed: none"):
        make_resolvers(ServerSettings(lora_resolvers=("hub",)), takes_adapters=True)


# -- the Hub


class StandInHub:
    """One repository on loopback, as the Hub shows it."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, root: Path) -> None:
        self.paths: list[str] = []  # of requests, in order
        self.is_away = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.paths.append(self.path.partition("?")[0])
                status, body, headers = hub.answer(root, self.path.partition("?")[0])
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, root: Path, path: str) -> tuple[int, bytes, dict[str, str]]:
        files = [one.relative_to(root).as_posix() for one in root.rglob("*") if one.is_file()]
        if self.is_away:
            return 403, b"", {}
        if path == "/api/models/org/adapters/revision/main":
            siblings = [{"rfilename": name} for name in files]
            info = {"id": "org/adapters", "sha": self.COMMIT, "siblings": siblings}
            return 200, json.dumps(info).encode(), {"content-type": "application/json"}
        if path.startswith("/api/models/org/adapters/tree/"):
            tree = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in files]
            return 200, json.dumps(tree).encode(), {"content-type": "application/json"}
        name = path.removeprefix(f"/org/adapters/resolve/{self.COMMIT}/")
        if name in files:
            body = (root / name).read_bytes()
            tag = hashlib.sha256(body).hexdigest()
            return 200, body, {"etag": f'"{tag}"', "x-repo-commit": self.COMMIT}
        return 404, b"", {"x-error-code": "RepoNotFound"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    repository = tmp_path / "repository"
    write_adapter(repository, MODULES, seed=5)
    write_adapter(repository / "team" / "legal", MODULES, seed=6)
    (repository / "team" / "legal" / "evil.py").write_text("raise SystemExit")
    (repository / "notes").mkdir()
    (repository / "notes" / "README.md").write_text("no adapter")
    hub = StandInHub(repository)
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def test_a_request_may_name_what_lies_in_a_repository_of_the_hub(hub: StandInHub) -> None:
    settings = ServerSettings(lora_resolver_hub=("org/adapters",))
    with simulating(LORA, settings) as server:
        for name in ("org/adapters", "org/adapters/team/legal"):
            response = ask(server, name)
            assert response.status_code == 200, response.text
            assert response.json()["model"] == name
        assert names(server) == ["org/adapters", "org/adapters/team/legal"]
        before = list(hub.paths)
        for name in (
            "org/adapters/notes", "org/adapters/team", "org/adapters/", "org/adapters/../x",
            "org/other", "org", "adapters", "org/adapters2", "other/adapters/team/legal",
        ):  # fmt: skip
            assert ask(server, name).status_code == 404, name
        assert hub.paths == before  # nothing is requested for names that clients make up
        server.check_idle()
    assert not any(path.endswith((".py", ".md")) for path in hub.paths)
    own = [path for path in hub.paths if path != "/api/agent-harnesses"]  # of its library
    assert all("/org/adapters/" in f"{path}/" for path in own), own


def test_what_is_added_to_a_repository_is_found_within_a_minute(hub: StandInHub, tmp_path: Path):
    now = 0.0
    resolver = HubResolver(["org/adapters@main"], now=lambda: now)
    assert resolver("org/adapters/new") is None
    write_adapter(tmp_path / "repository" / "new", MODULES, seed=7)
    assert resolver("org/adapters/new") is None
    now = LISTED_S
    found = resolver("org/adapters/new")
    assert found is not None and found.endswith("/new")


def test_a_hub_that_is_away_is_no_unknown_adapter(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.is_away = True
    with simulating(LORA, ServerSettings(lora_resolver_hub=("org/adapters",))) as server:
        response = ask(server, "org/adapters")
        assert response.status_code == 500
        assert "its resolver failed" in response.text
        assert hub.url not in response.text
        hub.is_away = False
        assert ask(server, "org/adapters").status_code == 200  # the failure is not remembered
    # Without the network, what is in the cache is served.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    sent = len(hub.paths)
    resolver = HubResolver(["org/adapters"])
    assert resolver("org/adapters") is not None
    assert resolver("org/adapters/team/legal") is None
    assert HubResolver(["org/unknown"])("org/unknown") is None
    assert len(hub.paths) == sent


@pytest.mark.parametrize("text", ["", "org", "org/a/b", "org/a.gguf/x", "../a", "org/a/b.gguf"])
def test_a_repository_is_org_and_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-resolver-hub takes ORG/NAME"):
        HubResolver([text])
