"""Pictures in chat over a real tiny model, from the body to the answer and back out as usage."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from PIL import Image

from octavo_engine.config import EngineConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.connect import in_process
from octavo_engine.core.media.prepare_sound import prepare_media as prepare
from octavo_engine.core.media.spec import PictureSpec
from octavo_engine.errors import ConfigError
from octavo_engine.server.app import build_app
from octavo_engine.server.http.loopback import post
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.engine.models.tiny_seeing import BEGIN, END, PLACEHOLDER, seeing_model
from tests.fakes.seeing import data_url, encoded, write_seeing_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RED, BLUE = (encoded(Image.new("RGB", (80, 60), colour)) for colour in ("red", "blue"))
NUM_ROWS = seeing_model("llava").media.num_rows


class Rig:
    def __init__(self, folder: Any, engine: Any = None, **settings: Any) -> None:
        self.runner = asyncio.Runner()
        config = EngineConfig(model=str(folder), num_threads=1, dtype="float32", **(engine or {}))
        self.engine = self.runner.run(self._start(config))
        self._app = build_app(self.engine, ServerSettings(**settings))

    @staticmethod
    async def _start(config: EngineConfig) -> AsyncEngine:
        engine = await AsyncEngine.start(config, connect=in_process)
        await engine.ready()
        return engine

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = self.runner.run(post(self._app, path, json.dumps(body).encode()))
        value: dict[str, Any] = answer.json()
        return answer.status, value

    def get(self, path: str) -> httpx.Response:
        async def answer() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.get(path)

        return self.runner.run(answer())

    def chat(self, *parts: Any, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": list(parts)}], **OPTIONS, **fields}
        status, answer = self.post("/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    def refusal(self, *parts: Any, **fields: Any) -> str:
        body = {"messages": [{"role": "user", "content": list(parts)}], **OPTIONS, **fields}
        status, answer = self.post("/v1/chat/completions", body)
        assert status == 400, answer
        message: str = answer["error"]["message"]
        return message

    def close(self) -> None:
        self.runner.run(self.engine.stop())
        self.runner.close()


OPTIONS: dict[str, Any] = {
    "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 0, "ignore_eos": True
}  # fmt: skip


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(write_seeing_model(tmp_path_factory.mktemp("seeing") / "llava"))
    yield rig
    rig.close()


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def picture(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def check_greedy(name: str, answer: Any, tokens: list[int], tiles: Any, *sizes: Any) -> None:
    """An answer's tokens, behind a prompt of these, have the probabilities of transformers."""
    for said in logprobs(answer):
        row = seeing_model(name).logits(tokens, tiles, *sizes)[-1].astype(np.float64)
        assert said == pytest.approx(row.max() - np.log(np.exp(row).sum()), abs=1e-4)
        tokens.append(int(row.argmax()))


def test_the_answer_is_what_transformers_says_of_the_picture(rig: Rig) -> None:
    answer = rig.chat(text("what colour is it ?"), picture(RED))
    workers = rig.engine.pictures
    assert workers is not None
    prepared_picture = prepare(RED, workers.spec).picture
    assert prepared_picture is not None
    tokens = [1, *[PLACEHOLDER] * NUM_ROWS, 4, 5, 6, 7, 8, 2]
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    check_greedy("llava", answer, tokens, list(prepared_picture.tiles))


def test_a_picture_of_several_tiles_is_computed_as_transformers_does(tmp_path: Path) -> None:
    halves = Image.new("RGB", (80, 60), "red")
    halves.paste("blue", (30, 10, 80, 60))
    rig = Rig(write_seeing_model(tmp_path / "smolvlm", "smolvlm"))
    try:
        workers = rig.engine.pictures
        assert workers is not None
        pictures = [prepare(data, workers.spec).picture for data in (encoded(halves), RED)]
        prepared = [picture for picture in pictures if picture is not None]
        assert [len(picture.tiles) for picture in prepared] == [10, 10]
        words = workers.tokens.around_tiles(prepared[0])
        around = [t for w in words for t in ([w] if w != PLACEHOLDER else [w] * 9)]
        tokens = [1, *around, *around, 4, 2]
        answer = rig.chat(text("what"), picture(encoded(halves)), picture(RED))
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        tiles = [tile for picture in prepared for tile in picture.tiles]
        check_greedy("smolvlm", answer, tokens, tiles)
        again = rig.chat(text("what"), picture(encoded(halves)), picture(BLUE))
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 1 + len(around) <= cached < 1 + len(around) + 9
    finally:
        rig.close()


@pytest.mark.slow
def test_tiles_that_suit_a_pictures_shape_are_computed_as_transformers_does(
    tmp_path: Path,
) -> None:
    wide = encoded(Image.new("RGB", (120, 40), "green"))
    rig = Rig(write_seeing_model(tmp_path / "internvl", "internvl"))
    try:
        workers = rig.engine.pictures
        assert workers is not None
        pictures = [prepare(data, workers.spec).picture for data in (wide, RED)]
        prepared = [picture for picture in pictures if picture is not None]
        around = [workers.tokens.around_tiles(picture) for picture in prepared]
        assert [len(tokens) for tokens in around] == [6, 9]
        rows = [t for w in [*around[0], *around[1]] for t in [w] * (9 if w == PLACEHOLDER else 1)]
        tokens = [1, *rows, 4, 5, 2]
        answer = rig.chat(text("what colour"), picture(wide), picture(RED))
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        tiles = [tile for picture in prepared for tile in picture.tiles]
        check_greedy("internvl", answer, tokens, tiles)
        again = rig.chat(text("what colour"), picture(wide), picture(BLUE))
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 40 <= cached < 60 and logprobs(again) != logprobs(answer)
    finally:
        rig.close()


def test_tiles_that_are_put_together_are_computed_as_transformers_does(tmp_path: Path) -> None:
    """A request's picture is encoded once, whatever its tiles are, and found again."""
    wide = encoded(Image.new("RGB", (120, 50), "green"))
    rig = Rig(write_seeing_model(tmp_path / "llava-next", "llava-next"))
    try:
        workers = rig.engine.pictures
        assert workers is not None
        pictures = [prepare(data, workers.spec).picture for data in (wide, RED)]
        items = [item for each in pictures if each for item in each.tiles]
        num_rows = [workers.spec.media.rows_of(item) for item in items]
        assert num_rows == [36 + 6 * (14 + 1), 36 + 10 * (12 + 1)]
        tokens = [1, *[PLACEHOLDER] * sum(num_rows), 4, 5, 2]
        parts = text("what colour"), picture(wide), picture(RED)
        answer = rig.chat(*parts)
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        check_greedy("llava-next", answer, tokens, items, [(50, 120), (60, 80)])
        again = rig.chat(*parts)
        assert logprobs(again) == logprobs(answer)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == again["usage"]["prompt_tokens"] - 1
        assert logprobs(rig.chat(parts[0], picture(wide), picture(BLUE))) != logprobs(answer)
    finally:
        rig.close()


def test_a_picture_whose_tokens_see_each_other_is_computed_as_transformers_does(
    tmp_path: Path,
) -> None:
    rig = Rig(write_seeing_model(tmp_path / "gemma3", "gemma3"))
    try:
        workers = rig.engine.pictures
        assert workers is not None
        tile = prepare(RED, workers.spec).picture
        assert tile is not None
        newlines = workers.tokens._tokenizer.encode("\n\n", add_special_tokens=False)
        around = [*newlines, BEGIN, *[PLACEHOLDER] * 9, END, *newlines]
        tokens = [1, *around, 4, 5, 2]
        answer = rig.chat(text("what colour"), picture(RED))
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        check_greedy("gemma3", answer, tokens, list(tile.tiles))
        again = rig.chat(text("what colour"), picture(RED))
        assert logprobs(again) == logprobs(answer)
        other = rig.chat(text("what colour"), picture(BLUE))
        assert logprobs(other) != logprobs(answer)
        body = {"messages": [{"role": "user", "content": [picture(RED)]}], **OPTIONS}
        status, refused = rig.post("/v1/chat/completions", body | {"prompt_logprobs": 1})
        assert status == 400, refused
        assert "not supported with pictures of this model" in refused["error"]["message"]
    finally:
        rig.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2vl", "qwen2.5vl", "qwen3vl"])
def test_tokens_of_a_picture_stand_in_lines_and_columns_as_in_transformers(
    tmp_path: Path, name: str
) -> None:
    """Answers too: what follows a picture stands where its longer side ends."""
    rig = Rig(write_seeing_model(tmp_path / name, name))
    try:
        workers = rig.engine.pictures
        assert workers is not None
        tall = encoded(Image.new("RGB", (40, 120), "green"))
        prepared = [prepare(data, workers.spec).picture for data in (RED, tall)]
        tiles = [tile for picture in prepared if picture for tile in picture.tiles]
        tokens = [1]
        for tile in tiles:
            num_rows = workers.spec.media.rows_of(tile)
            tokens += [BEGIN, *[PLACEHOLDER] * num_rows, END]
        tokens += [4, 5, 2]
        parts = text("what colour"), picture(RED), picture(tall)
        answer = rig.chat(*parts, max_tokens=12)
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        check_greedy(name, answer, tokens, tiles)
        assert logprobs(rig.chat(*parts, max_tokens=12)) == logprobs(answer)
    finally:
        rig.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral3", "llava-onevision"])
def test_pictures_of_other_forms_are_computed_as_transformers_does(
    tmp_path: Path, name: str
) -> None:
    """Lines that end with tokens of the text; a picture alone that is cut, and two that are not."""
    rig = Rig(write_seeing_model(tmp_path / name, name))
    try:
        workers = rig.engine.pictures
        assert workers is not None
        tall = encoded(Image.new("RGB", (40, 120), "green"))
        for files in ((tall,), (RED, tall)):
            spec = workers.spec.among(len(files))
            prepared = [prepare(data, spec).picture for data in files]
            tiles = [tile for picture in prepared if picture for tile in picture.tiles]
            tokens = [1]
            for tile in tiles:
                tokens += workers.tokens.of_tile(tile, len(tokens))[0]
            tokens += [4, 5, 2]
            parts = text("what colour"), *[picture(data) for data in files]
            answer = rig.chat(*parts)
            assert answer["usage"]["prompt_tokens"] == len(tokens)
            sizes = [(120, 40)] if len(files) == 1 else [(60, 80), (120, 40)]
            check_greedy(name, answer, tokens, tiles, sizes)
            again = rig.chat(*parts)
            assert logprobs(again) == logprobs(answer)
            cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == again["usage"]["prompt_tokens"] - 1
    finally:
        rig.close()


def test_a_model_that_may_hold_no_picture_has_no_tower(tmp_path: Path) -> None:
    folder = write_seeing_model(tmp_path / "gemma3", "gemma3")
    rig = Rig(folder, {"limit_mm_per_prompt": "image=0"})
    try:
        assert rig.engine.pictures is None and not rig.engine.info.sees
        assert rig.chat(text("what"))["usage"]["prompt_tokens"] == 3
        assert "this model takes no pictures" in rig.refusal(picture(RED))
    finally:
        rig.close()


def test_another_picture_gets_another_answer_and_the_same_one_is_cached(rig: Rig) -> None:
    first = rig.chat(picture(RED), text("tell me more"))
    other = rig.chat(picture(BLUE), text("tell me more"))
    again = rig.chat(picture(RED, detail="high"), text("tell me more"))
    assert logprobs(first) != logprobs(other)
    assert logprobs(first) == logprobs(again)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == again["usage"]["prompt_tokens"] - 1
    assert rig.chat(picture(BLUE), picture(RED))["usage"]["prompt_tokens"] == 2 * NUM_ROWS + 2


def test_several_answers_share_a_picture(rig: Rig) -> None:
    answer = rig.chat(picture(RED), text("what"), n=3, temperature=1.0, seed=4)
    assert len(answer["choices"]) == 3


def test_pictures_in_turns_before_and_a_url_as_text(rig: Rig) -> None:
    messages = [
        {
            "role": "user",
            "content": [text("what"), {"type": "image_url", "image_url": data_url(RED)}],
        },
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "more"},
    ]
    status, answer = rig.post("/v1/chat/completions", {"messages": messages, **OPTIONS})
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == NUM_ROWS + 7


def test_tokenize_counts_pictures(rig: Rig) -> None:
    messages = [{"role": "user", "content": [picture(RED), text("what")]}]
    status, answer = rig.post("/tokenize", {"messages": messages})
    assert status == 200
    assert answer["count"] == NUM_ROWS + 3
    assert answer["tokens"].count(PLACEHOLDER) == NUM_ROWS


def test_metrics_have_the_time_that_pictures_took_to_be_decoded(rig: Rig) -> None:
    def taken_s() -> float:
        page = rig.get("/metrics").text
        assert re.search(r"^octavo_mm_preprocess_pending\{.*\} 0\.0$", page, re.M)
        found = re.search(r"^octavo_mm_preprocess_seconds_total\{.*\} (\S+)$", page, re.M)
        assert found is not None, page
        return float(found[1])

    new = encoded(Image.new("RGB", (51, 37), "purple"))
    before = taken_s()
    rig.chat(picture(new), text("what"))
    once = taken_s()
    assert once > before
    rig.chat(picture(new), text("what else"))
    assert taken_s() == once  # it was not decoded again


def test_a_text_that_spells_the_placeholder_is_text(rig: Rig) -> None:
    answer = rig.chat(text("what is <image> ?"))
    assert answer["usage"]["prompt_tokens"] < NUM_ROWS
    assert "places for" not in json.dumps(rig.chat(text("<image>"), picture(RED)))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/cat.png", "are not fetched from 'https'"),
        ("file:///etc/passwd", "are not fetched from 'file'"),
        ("data:image/png,abc", "must look like data:image/png;base64"),
        ("data:text/plain;base64,YWJj", "must be image/*"),
        ("data:image/png;base64,####", "is not valid base64"),
        ("data:image/png;base64,YWJj", "none of the formats"),
        (data_url(RED[:60]), "cannot be decoded"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_place(rig: Rig, url: str, message: str) -> None:
    refusal = rig.refusal(text("what"), {"type": "image_url", "image_url": {"url": url}})
    assert message in refusal
    assert refusal.startswith("messages[0].content[1].image_url")


def test_other_refusals(rig: Rig) -> None:
    assert "at most 16" in rig.refusal(*[picture(RED)] * 17)
    assert "image_url.url is required" in rig.refusal({"type": "image_url", "image_url": {}})
    assert "detail must be one of" in rig.refusal(picture(RED, detail="best"))
    assert "maximum context length" in rig.refusal(*[picture(RED)] * 16)
    assert "truncate_prompt_tokens" in rig.refusal(picture(RED), truncate_prompt_tokens=5)
    assert "takes no sounds" in rig.refusal({"type": "input_audio", "input_audio": {}})


def test_the_flags_of_pictures_reach_every_request(tmp_path: Path) -> None:
    flags = {"limit_mm_per_prompt": "image=2", "mm_processor_kwargs": '{"resample": 0}'}
    rig = Rig(write_seeing_model(tmp_path / "llava"), flags, limits=RequestLimits(max_images=1))
    try:
        assert rig.engine.pictures is not None
        assert isinstance(rig.engine.pictures.spec, PictureSpec)
        assert rig.engine.pictures.spec.resample == 0
        rig.chat(picture(RED), picture(BLUE))
        three = [picture(RED)] * 3
        assert "messages hold 3 pictures; at most 2 may be sent" in rig.refusal(*three)
        body = {"messages": [{"role": "user", "content": three}]}
        status, answer = rig.post("/tokenize", body)
        assert status == 400 and "at most 2" in answer["error"]["message"]
    finally:
        rig.close()


def test_a_model_does_not_start_with_settings_that_cannot_be_applied(tmp_path: Path) -> None:
    folder = write_seeing_model(tmp_path / "llava")
    config = EngineConfig(
        model=str(folder), num_threads=1, dtype="float32", mm_processor_kwargs='{"tiles": 2}'
    )
    with pytest.raises(ConfigError, match="--mm-processor-kwargs: tiles is not supported"):
        asyncio.run(Rig._start(config))


def test_health_says_that_pictures_hang_and_other_requests_are_served(rig: Rig) -> None:
    pictures = rig.engine.pictures
    assert pictures is not None
    assert rig.get("/health").status_code == 200
    pictures.hang = "no process has computed for 3 s"
    try:
        answer = rig.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {"state": "stalled", "reason": pictures.hang}
        states = re.findall(r'octavo_engine_state.*state="(\w+)".* 1', rig.get("/metrics").text)
        assert states == ["stalled"]
        assert rig.chat(text("hi"))["choices"]
    finally:
        pictures.hang = ""
    assert rig.get("/health").status_code == 200


def test_other_protocols_say_the_same(rig: Rig) -> None:
    chat = rig.chat(picture(RED), text("tell me more"))
    base64 = data_url(RED).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": base64}
    blocks = [{"type": "image", "source": source}, text("tell me more")]
    messages = {
        "model": rig.engine.info.names[0],
        "messages": [{"role": "user", "content": blocks}],
    }
    status, answer = rig.post("/v1/messages", {**messages, "max_tokens": 5, "temperature": 0})
    assert status == 200, answer
    usage = answer["usage"]
    num_tokens = chat["usage"]["prompt_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
    status, counted = rig.post("/v1/messages/count_tokens", messages)
    assert (status, counted.get("input_tokens")) == (200, num_tokens)

    parts = [
        {"type": "input_image", "image_url": data_url(RED), "detail": "auto"},
        {"type": "input_text", "text": "tell me more"},
    ]
    given = {"input": [{"role": "user", "content": parts}]}
    body = {**given, "max_output_tokens": 16, "temperature": 0}
    status, answer = rig.post("/v1/responses", body)
    assert status == 200, answer
    assert answer["usage"]["input_tokens"] == num_tokens
    said = chat["choices"][0]["message"]["content"]
    assert answer["output"][0]["content"][0]["text"].startswith(said)
    status, counted = rig.post("/v1/responses/input_tokens", given)
    assert (status, counted.get("input_tokens")) == (200, num_tokens)


def test_errors_name_the_fields_of_their_protocol(rig: Rig) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "#"}}
    body = {"model": rig.engine.info.names[0], "max_tokens": 5}
    status, answer = rig.post(
        "/v1/messages", {**body, "messages": [{"role": "user", "content": [block]}]}
    )
    assert status == 400 and "is not valid base64" in answer["error"]["message"]
    block = {"type": "image", "source": {"type": "file", "file_id": "a"}}
    status, answer = rig.post(
        "/v1/messages", {**body, "messages": [{"role": "user", "content": [block]}]}
    )
    assert status == 400 and "content[0].source must be" in answer["error"]["message"]
    part = {"type": "input_image", "file_id": "a"}
    status, answer = rig.post("/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    assert status == 400 and answer["error"]["param"] == "input[0].content[0].image_url"


@pytest.mark.slow
def test_the_official_client_sends_pictures(rig: Rig) -> None:
    import httpx
    import openai

    async def ask() -> tuple[str, str]:
        transport = httpx.ASGITransport(app=rig._app)
        http: Any = httpx.AsyncClient(transport=transport, base_url="http://octavo")
        async with http:
            client = openai.AsyncOpenAI(
                base_url="http://octavo/v1", api_key="none", http_client=http
            )
            content: Any = [picture(RED), text("tell me more")]
            messages: Any = [{"role": "user", "content": content}]
            model = rig.engine.info.names[0]
            whole = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=5, temperature=0
            )
            stream = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=5, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content or "", "".join(pieces)

    whole, streamed = rig.runner.run(ask())
    assert whole == streamed != ""
