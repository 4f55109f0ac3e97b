"""Sounds in chat over a real tiny model that hears, and media that are named by a uuid."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest

from octavo_engine.core.media.prepare_sound import prepare_sound
from octavo_engine.core.media.spec import SoundSpec
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import RequestError
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.core.media.test_prepare_sound import RATE, noise
from tests.engine.models.tiny_seeing import PLACEHOLDER
from tests.engine.server.openai.chat.test_pictures import (
    BLUE,
    OPTIONS,
    RED,
    Rig,
    check_greedy,
    logprobs,
    picture,
    text,
)
from tests.engine.speech.test_decode import wav
from tests.fakes.seeing import data_url, write_seeing_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOUD, QUIET = (wav(noise(4800, seed).astype(np.float32), RATE) for seed in (1, 2))
NUM_TOKENS = 7  # of 4,800 samples: 30 frames, 15 rows
PROMPT = [1, 91, *[PLACEHOLDER] * NUM_TOKENS, 92, 4, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("hearing") / "qwen2audio", "qwen2audio")


@pytest.fixture(scope="module")
def rig(folder: Path) -> Iterator[Rig]:
    rig = Rig(folder)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = write_seeing_model(tmp_path_factory.mktemp("seeing") / "llava")
    rig = Rig(folder, api_keys=("one", "two"))
    yield rig
    rig.close()


def sound(data: bytes, **fields: Any) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}, **fields}


def test_the_answer_is_what_transformers_says_of_the_sound(rig: Rig) -> None:
    workers = rig.engine.pictures
    assert workers is not None
    assert isinstance(workers.spec, SoundSpec)
    prepared = prepare_sound(LOUD, workers.spec).picture
    assert prepared is not None
    answer = rig.chat(text("what"), sound(LOUD))
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    check_greedy("qwen2audio", answer, list(PROMPT), list(prepared.tiles))


def test_another_sound_has_another_answer_and_shares_no_cache(rig: Rig) -> None:
    loud = rig.chat(sound(LOUD), text("tell"))
    again = rig.chat(sound(LOUD), text("tell"))
    quiet = rig.chat(sound(QUIET), text("tell"))
    assert logprobs(loud) == logprobs(again) != logprobs(quiet)
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (again, quiet)]
    assert cached[0] == loud["usage"]["prompt_tokens"] - 1
    assert cached[1] == 2  # up to the sound


def test_a_sound_comes_as_a_data_url_and_is_counted(rig: Rig) -> None:
    by_url = {"type": "audio_url", "audio_url": {"url": data_url(LOUD, "audio/wav")}}
    assert logprobs(rig.chat(by_url, text("tell"))) == logprobs(rig.chat(sound(LOUD), text("tell")))
    messages = [{"role": "user", "content": [text("what"), sound(LOUD)]}]
    status, answer = rig.post("/tokenize", {"messages": messages})
    assert (status, answer["tokens"]) == (200, PROMPT)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "input_audio"}, "messages[0].content[0].input_audio.data is required"),
        ({"type": "input_audio", "input_audio": {"data": "?"}}, "input_audio.data is not valid"),
        (sound(b"no sound"), "input_audio cannot be read as audio"),
        (sound(wav(noise(9000).astype(np.float32), RATE)), "is longer than 0.5 seconds; send"),
        (picture(RED), "this model takes no pictures"),
        ({"type": "audio_url", "audio_url": "https://a.example/a.wav"}, "--allowed-media-domains"),
        ({"type": "audio_url", "audio_url": data_url(RED)}, "it must be audio/*"),
    ],
)
def test_what_is_no_sound_is_refused(rig: Rig, part: dict[str, Any], said: str) -> None:
    assert said in rig.refusal(part)


def test_models_that_see_take_no_sounds(seeing: Rig) -> None:
    body = {"messages": [{"role": "user", "content": [sound(LOUD)]}], **OPTIONS}
    status, answer = post(seeing, "one", body)
    assert status == 400
    assert "this model takes no sounds" in answer["error"]["message"]


def test_limits_count_sounds(folder: Path) -> None:
    rig = Rig(folder, engine={"limit_mm_per_prompt": "audio=1"})
    try:
        assert "hold 2 sounds; at most 1" in rig.refusal(sound(LOUD), sound(QUIET))
    finally:
        rig.close()
    rig = Rig(folder, engine={"limit_mm_per_prompt": "audio=0"})
    try:
        assert rig.engine.pictures is None
        assert "takes no sounds" in rig.refusal(sound(LOUD))
    finally:
        rig.close()


def test_offline_prompts_take_sounds(folder: Path, rig: Rig, tmp_path: Path) -> None:
    llm = LLM(str(folder), num_threads=1, dtype="float32")
    try:
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        (said,) = llm.chat([{"role": "user", "content": [text("what"), sound(LOUD)]}], params)
        assert list(said.prompt_token_ids) == PROMPT
        file = tmp_path / "loud.wav"
        file.write_bytes(LOUD)
        ids = [1, 91, PLACEHOLDER, 92, 4, 2]
        for given in (LOUD, file, [file], (noise(4800, 1), RATE)):
            prompt: Any = {"prompt_token_ids": ids, "multi_modal_data": {"audio": given}}
            (again,) = llm.generate(prompt, params)
            assert again.outputs[0].token_ids == said.outputs[0].token_ids
        for data, problem in (
            ({"image": RED}, "takes sounds .audio. only"),
            ({"audio": (noise(4800), 1)}, "has a rate of 1"),
            ({"audio": "loud.wav"}, "a tuple of samples and their rate"),
        ):
            with pytest.raises(RequestError, match=problem):
                llm.generate({"prompt_token_ids": ids, "multi_modal_data": data}, params)
        with pytest.raises(RequestError, match="takes no pictures"):
            llm.chat([{"role": "user", "content": [picture(RED)]}], params)
    finally:
        llm.close()


def test_the_official_client_sends_sounds(rig: Rig) -> None:
    messages: Any = [{"role": "user", "content": [text("what"), sound(LOUD)]}]

    async def ask() -> Any:
        transport = httpx.ASGITransport(rig._app)
        async with httpx.AsyncClient(transport=transport) as given:
            http: Any = given
            client = openai.AsyncOpenAI(base_url="http://here/v1", api_key="none", http_client=http)
            return await client.chat.completions.create(
                model=rig.engine.config.model, max_tokens=5, temperature=0, logprobs=True,
                messages=messages,
                extra_body={"ignore_eos": True},
            )  # fmt: skip

    answer = rig.runner.run(ask())
    assert answer.usage.prompt_tokens == len(PROMPT)
    said = [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert said == logprobs(rig.chat(text("what"), sound(LOUD)))


# ── media by uuid ──


def post(rig: Rig, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(rig._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post("/v1/chat/completions", json=body, headers=headers)

    response = rig.runner.run(answer())
    value: dict[str, Any] = response.json()
    return response.status_code, value


def num_encoded(rig: Rig) -> int:
    stats = rig.engine.stats
    return stats.mm_cache_queries - stats.mm_cache_hits


def ask(rig: Rig, part: dict[str, Any], key: str = "one") -> tuple[int, dict[str, Any]]:
    return post(rig, key, {"messages": [{"role": "user", "content": [part]}], **OPTIONS})


@pytest.mark.parametrize("absent", [{}, {"image_url": None}, {"image_url": {}}])
def test_a_picture_sent_once_may_be_named_by_its_uuid_alone(seeing: Rig, absent: Any) -> None:
    status, whole = ask(seeing, {**picture(RED), "uuid": "red"})
    assert status == 200, whole
    before = num_encoded(seeing)
    status, named = ask(seeing, {"type": "image_url", "uuid": "red", **absent})
    assert status == 200, named
    assert logprobs(named) == logprobs(whole)
    assert named["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert num_encoded(seeing) == before  # its rows were found


def test_a_uuid_is_a_name_and_no_proof_of_content(seeing: Rig) -> None:
    _, red = ask(seeing, {**picture(RED), "uuid": "changing"})
    _, blue = ask(seeing, {**picture(BLUE), "uuid": "changing"})
    assert logprobs(red) != logprobs(blue)
    _, named = ask(seeing, {"type": "image_url", "uuid": "changing"})
    assert logprobs(named) == logprobs(blue)


def test_what_is_not_held_is_refused_as_is_anothers(seeing: Rig) -> None:
    ask(seeing, {**picture(RED), "uuid": "mine"})
    for key, name in (("one", "unknown"), ("two", "mine")):
        status, answer = ask(seeing, {"type": "image_url", "uuid": name}, key)
        error = answer["error"]
        assert (status, error["code"]) == (400, "media_not_held")
        assert error["param"] == "messages[0].content[0].image_url"
        assert f"nothing is held under the uuid '{name}'" in error["message"]
    for name in ("", "x" * 257):
        status, answer = ask(seeing, {**picture(RED), "uuid": name})
        assert status == 400
        assert "uuid must have 1 to 256 characters" in answer["error"]["message"]
    status, answer = ask(seeing, {**picture(b"broken"), "uuid": "broken"})
    assert status == 400
    assert ask(seeing, {"type": "image_url", "uuid": "broken"})[0] == 400  # it was not kept


def test_a_sound_may_be_named_by_its_uuid(rig: Rig) -> None:
    whole = rig.chat(sound(LOUD, uuid="loud"), text("more"))
    named = rig.chat({"type": "input_audio", "uuid": "loud"}, text("more"))
    assert logprobs(named) == logprobs(whole)
