"""Adapters over HTTP: vLLM's routes, names in every API, and what becomes of requests meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import openai
import pytest

from octavo_engine.config import SchedulerConfig, SimConfig
from octavo_engine.errors import ConfigError
from octavo_engine.protocol import route_keys
from octavo_engine.server.served_adapters import AdapterModule, parse_modules
from octavo_engine.server.settings import ServerSettings
from octavo_engine.weights.adapter import read_adapter
from tests.fakes.adapters import write_adapter
from tests.fakes.process import serving
from tests.fakes.simulated import CONFIG, Simulated, simulating

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LORA = CONFIG.replace(enable_lora=True, max_loras=2, max_cpu_loras=3)
OPEN = ServerSettings(allow_runtime_lora_updating=True)
MODULES = {"model.layers.0.self_attn.q_proj": (16, 16)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("adapters")
    return [str(write_adapter(root / str(seed), MODULES, seed=seed)) for seed in range(6)]


@pytest.fixture
def server() -> Iterator[Simulated]:
    with simulating(LORA, OPEN) as server:
        yield server
        server.check_idle()


def post(server: Simulated, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30)


def load(server: Simulated, name: str, path: str, **fields: Any) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path, **fields)


def unload(server: Simulated, name: str) -> httpx.Response:
    return post(server, "/v1/unload_lora_adapter", lora_name=name)


def answer(server: Simulated, model: str, prompt: str = "hello", **fields: Any) -> str:
    fields = {"max_tokens": 12, "temperature": 0} | fields
    response = post(server, "/v1/completions", model=model, prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    body = response.json()["error"]
    return response.status_code, body["code"], body["param"]


def names(server: Simulated) -> list[str]:
    return [card["id"] for card in httpx.get(server.url + "/v1/models").json()["data"]]


def test_an_adapter_is_a_model_of_its_own(server: Simulated, folders: list[str]) -> None:
    response = load(server, "first", folders[0])
    assert (response.status_code, response.text) == (
        200, "Success: LoRA adapter 'first' added successfully."
    )  # fmt: skip
    card = httpx.get(server.url + "/v1/models/first").json()
    assert (card["id"], card["parent"], card["root"]) == ("first", "sim", folders[0])
    assert names(server) == ["sim", "first"]
    assert answer(server, "first") != answer(server, "sim")
    load(server, "second", folders[1])
    assert answer(server, "second") not in (answer(server, "first"), answer(server, "sim"))
    response = post(server, "/v1/completions", model="third", prompt="a")
    assert error(response) == (404, "model_not_found", "model")
    assert "There are: `sim`, `first`, `second`." in response.json()["error"]["message"]


def test_every_api_takes_the_name(server: Simulated, folders: list[str]) -> None:
    load(server, "first", folders[0])
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
    responses = {"input": "hello", "max_output_tokens": 12, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", chat), ("/v1/messages", chat), ("/v1/responses", responses)
    ):  # fmt: skip
        adapted, plain = (post(server, path, model=model, **body) for model in ("first", "sim"))
        assert adapted.status_code == plain.status_code == 200, adapted.text
        assert adapted.json()["model"] == "first"
        kinds = ("choices", "content", "output")
        assert [adapted.json().get(k) for k in kinds] != [plain.json().get(k) for k in kinds]


def test_a_name_is_loaded_once_unless_in_place(server: Simulated, folders: list[str]) -> None:
    load(server, "one", folders[0])
    before = answer(server, "one")
    again = load(server, "one", folders[1])
    assert error(again) == (400, "invalid_request", "lora_name")
    assert "already been loaded" in again.json()["error"]["message"]
    assert answer(server, "one") == before
    assert load(server, "one", folders[1], load_inplace=True).status_code == 200
    assert answer(server, "one") != before
    assert names(server) == ["sim", "one"]


def test_what_cannot_be_loaded_leaves_all_as_it_was(
    server: Simulated, folders: list[str], tmp_path: Path
) -> None:
    load(server, "one", folders[0])
    before = answer(server, "one")
    broken = write_adapter(tmp_path, MODULES, use_dora=True)
    assert error(load(server, "two", str(tmp_path / "none"))) == (
        404, "adapter_not_found", "lora_path"
    )  # fmt: skip
    assert error(load(server, "two", str(broken))) == (400, "invalid_request", "lora_path")
    assert error(load(server, "one", str(broken), load_inplace=True))[0] == 400
    assert error(load(server, "sim", folders[1])) == (400, "invalid_request", "lora_name")
    assert error(load(server, "", folders[1])) == (400, "invalid_request", "lora_name")
    assert error(unload(server, "two")) == (404, "adapter_not_found", "lora_name")
    assert (names(server), answer(server, "one")) == (["sim", "one"], before)


def test_two_names_may_have_one_content(server: Simulated, folders: list[str]) -> None:
    load(server, "one", folders[0])
    load(server, "two", folders[0])
    assert answer(server, "one") == answer(server, "two")
    assert unload(server, "one").status_code == 200
    assert len(answer(server, "two")) == 12
    assert names(server) == ["sim", "two"]


@pytest.mark.slow
def test_more_adapters_than_slots_and_memory_are_all_answered(
    server: Simulated, folders: list[str]
) -> None:
    for number, folder in enumerate(folders):
        load(server, f"a{number}", folder)
    alone = [answer(server, f"a{number}", max_tokens=40) for number in range(6)]
    together: dict[int, str] = {}

    def ask(index: int) -> None:
        together[index] = answer(server, f"a{index % 6}", max_tokens=40)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert together == {index: alone[index % 6] for index in range(24)}
    text = httpx.get(server.url + "/metrics").text
    assert 'max_lora="2"' in text
    assert 'octavo_lora_adapters_held{engine="0",model_name="sim"} 3.0' in text
    assert 'octavo_lora_load_seconds_count{engine="0",model_name="sim"}' in text


@pytest.mark.slow
def test_unloading_lets_what_runs_end_with_it(folders: list[str]) -> None:
    slow = LORA.replace(sim=SimConfig(kv_blocks=256, step_base_ms=20.0))
    with simulating(slow, OPEN) as server:
        load(server, "one", folders[0])
        whole = answer(server, "one", max_tokens=30)
        body = {"model": "one", "prompt": "hello", "max_tokens": 30, "temperature": 0}
        text = ""
        with httpx.stream(
            "POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=30
        ) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not text:
                    metrics = httpx.get(server.url + "/metrics").text
                    assert 'running_lora_adapters="one"' in metrics
                    assert unload(server, "one").status_code == 200
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert text == whole
        assert error(post(server, "/v1/completions", model="one", prompt="a"))[0] == 404
        server.check_idle()


def test_files_that_changed_are_noticed_when_they_are_read_again(
    server: Simulated, folders: list[str], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, MODULES, seed=10)
    load(server, "one", str(folder))
    for number in range(4):  # --max-cpu-loras are 3
        load(server, f"other-{number}", folders[number])
    write_adapter(tmp_path, MODULES, seed=11)
    response = post(server, "/v1/completions", model="one", prompt="a")
    assert error(response) == (400, "invalid_request", "model")
    assert "are others than when it was loaded" in response.json()["error"]["message"]
    assert load(server, "one", str(folder), load_inplace=True).status_code == 200
    assert answer(server, "one")


def test_pinned_adapters_stay_in_memory(
    server: Simulated, folders: list[str], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, MODULES, seed=12)
    load(server, "one", str(folder), pinned=True)
    before = answer(server, "one")
    for number in range(4):
        load(server, f"other-{number}", folders[number])
    (folder / "adapter_config.json").unlink()
    assert answer(server, "one") == before


def test_prefixes_are_shared_by_content_only(server: Simulated, folders: list[str]) -> None:
    def cached(model: str) -> int:
        response = post(
            server, "/v1/completions", model=model, prompt="x" * 100, max_tokens=1
        ).json()
        count: int = response["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    for name, folder in (("one", folders[0]), ("same", folders[0]), ("two", folders[1])):
        load(server, name, folder)
    assert [cached(model) for model in ("sim", "one", "two")] == [0, 0, 0]
    assert all(cached(model) >= 96 for model in ("sim", "one", "same", "two"))


def test_it_must_be_switched_on(folders: list[str]) -> None:
    with simulating(CONFIG, OPEN) as server:
        assert error(load(server, "one", folders[0])) == (400, "invalid_request", "lora_name")
    with simulating(LORA) as server:
        assert error(load(server, "one", folders[0])) == (403, "adapters_fixed", None)
        assert error(unload(server, "one")) == (403, "adapters_fixed", None)


@pytest.mark.slow
def test_a_request_waits_for_a_slot_and_no_longer_than_its_turn(folders: list[str]) -> None:
    """Two slots, held by a steady stream of two adapters: the third is not left waiting."""
    config = LORA.replace(
        scheduler=SchedulerConfig(max_num_seqs=4, max_queue=256, aging_s=0.2),
        sim=SimConfig(kv_blocks=256, step_base_ms=2.0),
    )
    with simulating(config, OPEN) as server:
        for number in range(3):
            load(server, f"a{number}", folders[number])
        is_over = threading.Event()

        def keep_asking(name: str) -> None:
            while not is_over.is_set():
                answer(server, name, max_tokens=40, prompt=name)

        threads = [
            threading.Thread(target=keep_asking, args=(f"a{number % 2}",)) for number in range(6)
        ]
        for thread in threads:
            thread.start()
        try:
            assert len(answer(server, "a2")) == 12
        finally:
            is_over.set()
            for thread in threads:
                thread.join(30)


def test_modules_are_given_as_name_and_path_or_json() -> None:
    given = ["a=/x", '{"name": "b", "path": "/y=z", "base_model_name": "m"}']
    assert parse_modules(given, ["m"]) == [AdapterModule("a", "/x"), AdapterModule("b", "/y=z")]
    for text, message in (
        ("a", "takes NAME=PATH or JSON"), ("m=/x", "is given twice"),
        ('{"name": "b"}', "path must"),
        ('{"name": "b", "path": "/x", "rank": 1}', "unknown field rank"), ("{", "not valid JSON"),
        ('{"name": "b", "path": "/x", "base_model_name": "n"}', "not served here"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            parse_modules([text], ["m"])


@pytest.mark.slow
def test_routers_hear_of_adapters_and_find_their_prefixes(
    server: Simulated, folders: list[str]
) -> None:
    load(server, "zero", folders[0])
    zero, one = (read_adapter(folder).digest for folder in folders[:2])
    body = {"model": "one", "prompt": "y" * 400, "max_tokens": 1}
    (key, *_), (plain, *_) = (
        route_keys.keys_of(body, "completion", adapter) for adapter in (one, "")
    )
    unpacker = msgspec.msgpack.Decoder()
    adapters, digests, stored, buffer = None, None, b"", b""
    with httpx.stream("GET", server.url + "/octavo/v1/stream", timeout=30) as stream:
        for data in stream.iter_raw():
            buffer += data
            while len(buffer) >= 4 and len(buffer) >= 4 + (
                size := int.from_bytes(buffer[:4], "little")
            ):
                kind, fields = unpacker.decode(buffer[4 : 4 + size])
                buffer = buffer[4 + size :]
                if kind == "hello":
                    assert (fields["names"], fields["adapters"]) == (["sim", "zero"], ["zero"])
                    assert fields["adapter_digests"] == {"zero": zero}
                if kind == "snapshot":
                    load(server, "one", folders[1])
                    assert post(server, "/v1/completions", **body).status_code == 200
                if fields.get("adapters"):
                    adapters, digests = fields["adapters"], fields["adapter_digests"]
                stored += fields.get("stored") or b""
            if adapters == ["zero", "one"] and key.to_bytes(8, "little") in stored:
                break
    assert plain.to_bytes(8, "little") not in stored
    assert digests == {"zero": zero, "one": one}


@pytest.mark.slow
def test_a_server_starts_with_adapters_and_openais_client_names_them(
    folders: list[str], tmp_path: Path
) -> None:
    module = json.dumps({"name": "two", "path": folders[1], "base_model_name": "sim"})
    flags = ("m", "--served-model-name", "sim", "--enable-lora", "--files-dir", str(tmp_path))
    with serving(*flags, "--lora-modules", f"one={folders[0]}", module) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        assert [model.id for model in client.models.list()] == ["sim", "one", "two"]
        hello: list[Any] = [{"role": "user", "content": "hello"}]
        said = {
            name: client.chat.completions.create(
                model=name, messages=hello, max_tokens=12, temperature=0
            ).choices[0].message.content
            for name in ("sim", "one", "two")
        }  # fmt: skip
        assert len(set(said.values())) == 3
        lines = b"".join(
            json.dumps({
                "custom_id": name, "method": "POST", "url": "/v1/chat/completions",
                "body": {"model": name, "messages": hello, "max_tokens": 12, "temperature": 0},
            }).encode() + b"\n"
            for name in said
        )  # fmt: skip
        file = client.files.create(file=("in.jsonl", lines), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while (batch := client.batches.retrieve(batch.id)).completed_at is None:
            assert batch.status in ("validating", "in_progress", "finalizing")
        assert batch.output_file_id is not None
        answers = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
        assert {
            each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
            for each in answers
        } == said


@pytest.mark.slow
def test_a_server_does_not_start_without_its_adapters(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo.cli", "serve", "--device", "sim", "--port", "0"]
    for flags, message in (
        (["--enable-lora", "--lora-modules", f"a={tmp_path}"], "has no adapter_config.json"),
        (["--lora-modules", f"a={tmp_path}"], "start it with --enable-lora"),
        (["--lora-extra-vocab-size", "256"], "adapters cannot bring tokens of their own"),
        (["--max-loras", "0"], "--max-loras must be from 1"),
    ):
        ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)
        assert ended.returncode != 0
        assert message in ended.stderr
