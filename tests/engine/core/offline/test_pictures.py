"""Pictures of offline prompts: the same answers as over HTTP, whichever form a picture has."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from octavo_engine.config import SimConfig
from octavo_engine.core.media.prepare import MAX_PIXELS, prepare
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import InvalidRequest, RequestError
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.models.tiny_seeing import PLACEHOLDER, seeing_model
from tests.fakes.seeing import data_url, encoded, write_seeing_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from octavo_engine.core.beam_search import BeamSearchParams
    from octavo_engine.core.text.outputs import RequestOutput

PICTURE = Image.new("RGB", (80, 60), "red")
RED, BLUE = encoded(PICTURE), encoded(Image.new("RGB", (80, 60), "blue"))
NUM_ROWS = seeing_model("llava").media.num_rows
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
WORDS = {"type": "text", "text": "what colour is it ?"}
RENDERED = "user <image> what colour is it ? assistant"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_seeing_model(tmp_path_factory.mktemp("seeing") / "llava")
    with LLM(folder, num_threads=1, dtype="float32") as llm:
        yield llm


def by_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def chat(llm: LLM, *parts: Any) -> RequestOutput:
    return llm.chat([{"role": "user", "content": list(parts)}], GREEDY, use_tqdm=False)[0]


def generate(llm: LLM, pictures: Any, prompt: str = RENDERED) -> RequestOutput:
    data = {"image": pictures}
    return llm.generate({"prompt": prompt, "multi_modal_data": data}, GREEDY, use_tqdm=False)[0]


def logprobs(output: RequestOutput) -> list[float]:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [choices.logprob for choices in answer.logprobs]


def test_the_answer_is_what_transformers_says_of_the_picture(llm: LLM) -> None:
    output = chat(llm, WORDS, by_url(RED))
    picture = prepare(RED, seeing_spec(llm)).picture
    assert picture is not None
    tokens = [1, *[PLACEHOLDER] * NUM_ROWS, 4, 5, 6, 7, 8, 2]
    assert output.prompt_token_ids == tokens
    for said in logprobs(output):
        row = seeing_model("llava").logits(tokens, list(picture.tiles))[-1].astype(np.float64)
        assert said == pytest.approx(row.max() - np.log(np.exp(row).sum()), abs=1e-4)
        tokens.append(int(row.argmax()))


def seeing_spec(llm: LLM) -> Any:
    return llm._pictures._spec


def test_every_form_of_a_picture_is_the_same_picture(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(RED)
    expected = logprobs(chat(llm, by_url(RED), WORDS))
    with_alpha = PICTURE.convert("RGBA")
    chats = (
        {"type": "image_url", "image_url": data_url(RED)},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "image_pil", "image_pil": with_alpha},
        {"type": "image_pil", "image_pil": Image.open(file)},
    )
    for part in chats:
        assert logprobs(chat(llm, part, WORDS)) == expected
    for form in (PICTURE, RED, file, data_url(RED), [PICTURE]):
        assert logprobs(generate(llm, form)) == expected
    assert logprobs(generate(llm, BLUE)) != expected


def test_an_opened_picture_is_turned_as_its_file_would_be(llm: LLM) -> None:
    halves = Image.new("RGB", (40, 40), "red")
    halves.paste("blue", (0, 0, 40, 10))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(halves, exif=exif)
    from_file, opened = generate(llm, turned), generate(llm, Image.open(io.BytesIO(turned)))
    assert logprobs(opened) == logprobs(from_file) != logprobs(generate(llm, halves))


def test_several_prompts_have_pictures_of_their_own_and_the_queue_takes_them(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": [by_url(each), WORDS]}] for each in (RED, BLUE)]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    alone = [chat(llm, by_url(each), WORDS) for each in (RED, BLUE)]
    assert [logprobs(each) for each in outputs] == [logprobs(each) for each in alone]
    llm.enqueue({"prompt": RENDERED, "multi_modal_data": {"image": BLUE}}, GREEDY)
    assert logprobs(llm.wait_for_completion(use_tqdm=False)[0]) == logprobs(alone[1])
    two = chat(llm, by_url(BLUE), by_url(RED))
    assert len(two.prompt_token_ids) == 2 * NUM_ROWS + 2


def test_the_callers_bound_of_pixels_is_left_alone(llm: LLM, monkeypatch: Any) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    generate(llm, RED)
    assert Image.MAX_IMAGE_PIXELS == 1_000_000


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": "https://a.example/b.png"}, "are not fetched"),
        ({"type": "image_url"}, "messages[0].content[0].image_url is required"),
        ({"type": "image_pil"}, "messages[0].content[0].image_pil is required"),
        ({"type": "image_pil", "image_pil": "a.png"}, "must be a PIL image, the bytes of a file"),
        ({"type": "video_url", "video_url": "a"}, "reads text only"),
    ],
)
def test_parts_that_hold_no_picture_are_refused(llm: LLM, part: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(llm, part, WORDS)
    assert message in caught.value.message


def test_data_that_are_no_pictures_are_refused(llm: LLM, tmp_path: Path) -> None:
    large = Image.new("1", (MAX_PIXELS // 1000, 1001))
    for given, message in (
        (b"text", "multi_modal_data['image'][0] is none of the formats"),
        (RED[:60], "multi_modal_data['image'][0] cannot be decoded"),
        (tmp_path / "none.png", "cannot read"),
        (tmp_path, "Is a directory"),
        (large, "make it smaller"),
        ([PICTURE, PICTURE], "has places for 1 pictures, but 2 were sent"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            generate(llm, given)
        assert message in caught.value.message
        assert "in prompt 0" in caught.value.__notes__
    with pytest.raises(InvalidRequest, match="with the key image"):
        llm.generate({"prompt": RENDERED, "multi_modal_data": {"video": 1}}, GREEDY)
    with pytest.raises(InvalidRequest, match="has places for 0 pictures"):
        generate(llm, PICTURE, "user what assistant")


def test_vllms_settings_of_pictures_hold_for_prompts(llm: LLM, tmp_path: Path) -> None:
    folder = write_seeing_model(tmp_path / "llava")
    settings: dict[str, Any] = {
        "limit_mm_per_prompt": {"image": 1}, "mm_processor_kwargs": {"image_mean": [0.1, 0.9, 0.1]},
        "mm_processor_cache_gb": 0.01,
    }  # fmt: skip
    with LLM(folder, num_threads=1, dtype="float32", **settings) as other:
        assert logprobs(generate(other, RED)) != logprobs(generate(llm, RED))
        with pytest.raises(InvalidRequest, match="limit_mm_per_prompt allows 1 in one prompt"):
            generate(other, [RED, BLUE])


def test_beam_search_and_models_of_text_take_no_pictures(llm: LLM) -> None:
    params: BeamSearchParams = None  # type: ignore[assignment]  # refused before it is read
    with pytest.raises(InvalidRequest, match="not supported by beam_search"):
        llm.beam_search({"prompt": RENDERED, "multi_modal_data": {"image": RED}}, params)
    with LLM(device="sim", sim=SimConfig(kv_blocks=256, time_scale=0.0)) as text_model:
        with pytest.raises(RequestError, match="this model takes no pictures") as caught:
            generate(text_model, RED)
        assert caught.value.code == "not_supported"
