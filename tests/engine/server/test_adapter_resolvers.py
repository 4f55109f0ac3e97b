"""Adapters that a request names and nobody loaded: found in a folder or by a package's function."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from octavo_engine.errors import ConfigError
from octavo_engine.server import adapter_resolvers
from octavo_engine.server.adapter_resolvers import FolderResolver, make_resolvers
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
    with pytest.raises(ConfigError, match="need --enable-lora"):
        make_resolvers(ServerSettings(lora_resolver_dir=str(tmp_path)), takes_adapters=False)
    with pytest.raises(ConfigError, match="hub: no package has it; installed: none"):
        make_resolvers(ServerSettings(lora_resolvers=("hub",)), takes_adapters=True)
