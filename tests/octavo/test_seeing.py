"""A model that was trained here to see, as its users run it: engines, a router and the clients.

SmolLM2 with a tower of its own (benchmarks/vision_model.py) says what colour a square has. Each
picture is one that it was not trained on.
"""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import numpy as np
import pytest

from benchmarks.vision_model import LINES, SIDE, PictureQuestion, data_url, is_right, unseen
from tests.fakes.process import PATIENCE_S, ServeProcess, environment, serving
from tests.fakes.router_process import RouterProcess, routing
from tests.fakes.trained_seeing import trained_seeing_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from openai.types.chat import ChatCompletion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NAME = "seeing"
FLAGS = ("--device", "cpu", "--num-threads", "1", "--max-model-len", "1024",
         "--queue-timeout", "600")  # fmt: skip
SQUARE = "What colour is the square?"
SQUARES = unseen(48, kind=SQUARE)
CAPITAL = "What is the capital of France?"
NUM_ROWS = LINES**2
NUM_BEFORE = 3  # tokens before a picture's rows: a message begins, of the user, in a line
MOST_TOKENS = 12


class Platform(NamedTuple):
    folder: Path
    engines: list[ServeProcess]
    router: RouterProcess


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Two engines with the model behind a router."""
    folder = trained_seeing_model()
    config = tmp_path_factory.mktemp("router") / "router.yaml"
    config.write_text("server: {debug_endpoints: true}\n")
    flags = (str(folder), "--served-model-name", NAME, *FLAGS)
    with serving(*flags) as first, serving(*flags) as second:
        urls = f"{first.url},{second.url}"
        with routing("--config", str(config), "--upstreams", urls) as router:
            yield Platform(folder, [first, second], router)


def content(about: PictureQuestion, text: str | None = None) -> list[Any]:
    url = {"url": data_url(about.picture)}
    words = about.question.text if text is None else text
    return [{"type": "image_url", "image_url": url}, {"type": "text", "text": words}]


def ask(url: str, *contents: Any) -> list[ChatCompletion]:
    """All at once, by OpenAI's own client; greedy."""
    import openai

    async def every() -> list[ChatCompletion]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
        ) as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=NAME, messages=[{"role": "user", "content": each}],
                        temperature=0, max_tokens=MOST_TOKENS,
                    )
                    for each in contents
                )
            )  # fmt: skip

    return asyncio.run(every())


def ask_streamed(url: str, *contents: Any) -> list[str]:
    import openai

    async def one(client: openai.AsyncOpenAI, each: Any) -> str:
        stream = await client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": each}],
            temperature=0, max_tokens=MOST_TOKENS, stream=True,
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def every() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, each) for each in contents))

    return asyncio.run(every())


def texts(answers: list[ChatCompletion]) -> list[str]:
    return [answer.choices[0].message.content or "" for answer in answers]


def cached(answer: ChatCompletion) -> int:
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


class Encoding(NamedTuple):
    calls: int
    seconds: float


def encoding(server: ServeProcess) -> Encoding:
    """What an engine's encoder has done so far."""
    text = httpx.get(f"{server.url}/metrics").text

    def value(name: str) -> float:
        found = re.search(rf"^octavo_mm_{name}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.M)
        assert found is not None, text
        return float(found[1])

    calls = value("cache_queries") - value("cache_hits")
    return Encoding(round(calls), value("encode_seconds"))


def test_it_says_what_colour_a_square_has_beside_texts_of_others(platform: Platform) -> None:
    """By chance one of eight is right: 16 of 48 happens less than once in three thousand times.
    Whole and streamed, in one batch with text or alone, the answers are the same."""
    engine = platform.engines[0]
    contents = [content(about) for about in SQUARES]
    together = ask(engine.url, *contents, *[CAPITAL] * 4)
    said = texts(together)
    right = [is_right(about.question, text) for about, text in zip(SQUARES, said, strict=False)]
    assert sum(right) >= 16, said
    assert all("Paris" in text for text in said[len(SQUARES) :]), said
    assert ask_streamed(engine.url, *contents[:6], CAPITAL) == [*said[:6], said[-1]]
    assert texts(ask(engine.url, contents[0])) == said[:1]


def test_it_reads_digits(platform: Platform) -> None:
    """By chance one of ten digits is right: 12 of 48 happens once in several hundred times."""
    about = unseen(48, kind="Which digit")
    said = texts(ask(platform.engines[0].url, *(content(each) for each in about)))
    right = [is_right(each.question, text) for each, text in zip(about, said, strict=True)]
    assert sum(right) >= 12, said


def test_another_picture_gets_its_own_answer_and_none_of_the_others_cache(
    platform: Platform,
) -> None:
    url = platform.engines[1].url
    said = {}
    for about in SQUARES[:8]:
        (answer,) = ask(url, content(about, SQUARE))
        said[about.question.answer] = texts([answer])[0]
        assert cached(answer) <= NUM_BEFORE
    assert len({said[colour] for colour in said}) >= len(said) - 2 >= 2, said


def test_a_picture_that_comes_again_costs_no_encoder(platform: Platform) -> None:
    engine, about = platform.engines[1], unseen(120)[-1]
    before = encoding(engine)
    (first,) = ask(engine.url, content(about))
    seen = encoding(engine)
    assert (seen.calls - before.calls, seen.seconds > before.seconds) == (1, True)
    (again,) = ask(engine.url, content(about))
    assert first.usage is not None
    assert cached(again) == first.usage.prompt_tokens - 1
    assert texts([again]) == texts([first])
    (other,) = ask(engine.url, content(about, "Is it a nice picture?"))
    assert cached(other) >= NUM_BEFORE + NUM_ROWS
    # Text first: the picture's keys and values are others, its rows are the same.
    words = {"type": "text", "text": "Look at this."}
    turns = [words, *content(about)]
    ask(engine.url, [words], turns)
    assert encoding(engine) == seen


def test_a_picture_that_comes_again_is_found_as_text_of_the_same_length_is(
    platform: Platform,
) -> None:
    """So both wait for as many tokens; `python -m benchmarks.vision_model measure` shows times."""
    url, about = platform.engines[1].url, unseen(140)[-1]
    words = " square" * NUM_ROWS + "\n"
    found = []
    for kind in ("picture", "words"):
        for text in ("What is it?", "Is it red?"):
            text_alone = [{"type": "text", "text": words + text}]
            (answer,) = ask(url, content(about, text) if kind == "picture" else text_alone)
        assert answer.usage is not None
        found.append((answer.usage.prompt_tokens, cached(answer)))
    assert found[0] == found[1]


def test_the_router_sends_a_picture_to_the_engine_that_has_it(platform: Platform) -> None:
    router, several = platform.router, unseen(176)[160::4]
    answers = ask(router.url, *(content(about) for about in several))
    alone = ask(platform.engines[0].url, *(content(about) for about in several))
    assert texts(answers) == texts(alone)
    for about in several:
        body = {"model": NAME, "messages": [{"role": "user", "content": content(about)}]}
        router.until(lambda body=body: router.would_match(body) > NUM_ROWS)  # type: ignore[misc]
    # One at a time: beside others, an engine that has less to do may well win.
    again = [ask(router.url, content(about))[0] for about in several]
    for answer in again:
        assert answer.usage is not None
        assert cached(answer) == answer.usage.prompt_tokens - 1
    assert texts(again) == texts(answers)


def test_the_router_knows_which_engine_holds_a_picture_by_its_uuid(platform: Platform) -> None:
    """The request that brings the file and those that name it have one route key. Where a request
    goes depends on what else engines do, too."""
    import openai

    router, several = platform.router, unseen(208)[192::8]
    brought, named = [], []
    for number, about in enumerate(several):
        picture, text = content(about)
        name = f"square-{number}"
        brought.append([{**picture, "uuid": name}, text])
        named.append([{"type": "image_url", "image_url": {}, "uuid": name}, text])
    answers = ask(router.url, *brought)
    for each, answer in zip(named, answers, strict=True):
        body = {"model": NAME, "messages": [{"role": "user", "content": each}]}
        router.until(lambda body=body: router.would_match(body) > NUM_ROWS)  # type: ignore[misc]
        found = []
        for engine in platform.engines:
            try:
                found += ask(engine.url, each)
            except openai.BadRequestError as error:
                assert "nothing is held under the uuid" in str(error)
        assert texts(found) == texts([answer])  # one of the two holds it
        assert found[0].usage is not None
        assert cached(found[0]) == found[0].usage.prompt_tokens - 1


def test_other_apis_and_the_terminal_say_the_same(platform: Platform, tmp_path: Path) -> None:
    import anthropic
    import openai

    url, about = platform.router.url, SQUARES[1]
    expected = texts(ask(url, content(about)))[0]
    picture, text = content(about)
    encoded = picture["image_url"]["url"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        parts: Any = [
            {"type": "input_image", "image_url": encoded, "detail": "auto"},
            {"type": "input_text", "text": text["text"]},
        ]
        response = client.responses.create(
            model=NAME, input=[{"role": "user", "content": parts}], temperature=0,
            max_output_tokens=16,
        )  # fmt: skip
        assert response.output_text.startswith(expected)
    data = encoded.partition(",")[2]
    with anthropic.Anthropic(base_url=url, api_key="none") as other:
        source: Any = {"type": "base64", "media_type": "image/png", "data": data}
        blocks: Any = [{"type": "image", "source": source}, text]
        message = other.messages.create(
            model=NAME, messages=[{"role": "user", "content": blocks}],
            max_tokens=MOST_TOKENS, extra_body={"temperature": 0},
        )  # fmt: skip
        assert [block.text for block in message.content if block.type == "text"] == [expected]
    file = tmp_path / "square.png"
    file.write_bytes(base64.b64decode(data))
    command = [sys.executable, "-m", "octavo.cli", "chat", "--url", url, "--image", str(file)]
    command += ["-p", text["text"], "--temperature", "0", "--max-tokens", str(MOST_TOKENS)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, expected.strip()), done.stderr


def test_offline_it_computes_what_transformers_does(platform: Platform) -> None:
    """Of the same checkpoint in float32: each token's log-probability, and its choice."""
    import torch
    from PIL import Image
    from transformers import LlavaForConditionalGeneration

    from octavo import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    about = SQUARES[:2]
    chats: list[Any] = [
        [{"role": "user", "content": [{"type": "image_pil", "image_pil": each.picture},
                                      {"type": "text", "text": SQUARE}]}]
        for each in about
    ]  # fmt: skip
    with LLM(str(platform.folder), dtype="float32", num_threads=1, max_model_len=256) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
    model = LlavaForConditionalGeneration.from_pretrained(
        str(platform.folder), dtype=torch.float32
    ).eval()
    for each, output in zip(about, outputs, strict=True):
        (answer,) = output.outputs
        assert output.prompt_token_ids is not None and answer.logprobs is not None
        small = np.asarray(each.picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        pixels = torch.from_numpy(small.transpose(2, 0, 1)[None].astype(np.float32))
        ids = torch.tensor([[*output.prompt_token_ids, *answer.token_ids[:-1]]])
        with torch.inference_mode():
            logits = model(input_ids=ids, pixel_values=(pixels / 255 - 0.5) / 0.5).logits[0]
        best = logits[-len(answer.token_ids) :].log_softmax(-1).max(-1)
        assert best.indices.tolist() == answer.token_ids
        computed = [one.logprob for one in answer.logprobs]
        np.testing.assert_allclose(computed, best.values.numpy(), atol=2e-3)
