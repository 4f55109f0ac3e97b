"""Route keys of prompts with pictures: what routers are promised is what the next prompt finds.

Red when: a key that does not cover a picture counts its rows, wherever the template writes it; the
key that ends with a picture does not count them; another picture finds what is not its own.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from octavo_engine.config import BLOCK_SIZE, EngineConfig
from octavo_engine.core.connect import in_process
from octavo_engine.core.media.prompt import PicturePlace
from octavo_engine.protocol import route_keys
from octavo_engine.server.routers.label_offsets import TokenEnds, label_text, place_pictures
from octavo_engine.state.media import MediaSpan
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer
from tests.engine.server.routers.test_residency_prediction import bench
from tests.fakes.seeing import data_url, encoded, write_seeing_model

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 40
MARK = b"@"  # a picture's placeholder: one byte, a token
AROUND = [91, 92], [93]  # tokens before and behind its rows that no text has


def picture(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def rendered(messages: list[dict[str, Any]], order: str) -> bytes:
    """As templates write pictures: where they are, or before or behind a message's texts."""
    prompt = b""
    for message in messages:
        parts = list(message["content"])
        if order != "as sent":
            parts.sort(key=lambda part: (part["type"] == "text") == (order == "pictures first"))
        prompt += b"<" + b"|".join(
            MARK if p["type"] != "text" else p["text"].encode() for p in parts
        )
        prompt += message.get("name", "").encode() + b">\n"
    return prompt


def expanded(
    messages: list[dict[str, Any]], prompt: bytes
) -> tuple[list[int], list[MediaSpan], list[PicturePlace]]:
    pictures = iter(p for m in messages for p in m["content"] if p["type"] != "text")
    ids: list[int] = []
    spans: list[MediaSpan] = []
    places: list[PicturePlace] = []
    for byte in prompt:
        if bytes([byte]) != MARK:
            ids.append(byte)
            continue
        url = next(pictures)["image_url"]["url"]
        before, behind = AROUND
        first = len(ids)
        ids += before
        spans.append(MediaSpan(url.encode(), len(ids), NUM_ROWS))
        ids += [*[byte] * NUM_ROWS, *behind]
        places.append(PicturePlace(first, len(ids), byte))
    return ids, spans, places


def found(messages: list[dict[str, Any]], order: str) -> list[Any]:
    """What a prefix cache compares: tokens, and for rows the picture that they are of."""
    ids, spans, _ = expanded(messages, rendered(messages, order))
    seen: list[Any] = list(ids)
    for span in spans:
        seen[span.first : span.end] = [(span.digest, i) for i in range(span.length)]
    return seen


def labels(messages: list[dict[str, Any]], order: str) -> dict[int, int]:
    """Tokens by name: what a router may expect to find."""
    canonical = route_keys.canonical({"messages": messages}, kind="chat")
    assert canonical is not None
    prompt = rendered(messages, order)
    ids, _, pictures = expanded(messages, prompt)
    ends = TokenEnds(ByteTokenizer(), 256)(ids, prompt, pictures=pictures)
    made = label_text(
        canonical, route_keys.lookup_keys(canonical), prompt, ends, merges=False,
        pictures=place_pictures(canonical, ends, pictures),
    )  # fmt: skip
    if made is None:
        return {}
    return dict(struct.iter_unpack("<QI", made.entries))


ORDERS = ("as sent", "pictures first", "pictures last")
PICTURES = st.integers(0, 2).map(lambda n: picture("ABC"[n]))
TEXTS = st.tuples(st.integers(0, 130), st.sampled_from("xy")).map(lambda x: text(x[1] * x[0]))


def messages_of(contents: Any) -> Any:
    message = st.fixed_dictionaries(
        {"role": st.just("user"), "content": contents}, optional={"name": st.just("Zoe")}
    )
    return st.lists(message, min_size=1, max_size=3)


ANY = messages_of(st.lists(st.one_of(PICTURES, TEXTS), min_size=1, max_size=4))
# Templates that move pictures: messages of the same kinds of parts.
AFTER, BEFORE = (
    messages_of(st.tuples(*pair).map(list)) for pair in ((TEXTS, PICTURES), (PICTURES, TEXTS))
)


def num_common(first: list[dict[str, Any]], other: list[dict[str, Any]], order: str) -> int:
    left, right = found(first, order), found(other, order)
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)


@pytest.mark.parametrize(
    ("order", "messages"),
    [
        ("as sent", ANY),
        *((order, kind) for order in ORDERS[1:] for kind in (AFTER, BEFORE)),
    ],
)
@given(st.data())
@settings(deadline=None, max_examples=100)
def test_no_label_promises_more_than_a_block_that_another_prompt_would_not_find(
    order: str, messages: Any, data: st.DataObject
) -> None:
    first = data.draw(messages)
    other = [*first[: data.draw(st.integers(0, 3))], *data.draw(messages)]
    promised = labels(first, order)
    canonical = route_keys.canonical({"messages": other}, kind="chat")
    assert canonical is not None
    known = [n for n in route_keys.lookup_keys(canonical) if n in promised]
    if known:
        assert promised[known[-1]] <= num_common(first, other, order) + BLOCK_SIZE


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_chars", [1, 11, 39, 40, 41, 57, 58, 120])
@pytest.mark.parametrize("side", ["before", "behind", "alone"])
def test_the_key_that_ends_with_a_picture_counts_its_rows(
    order: str, num_chars: int, side: str
) -> None:
    parts = {
        "before": [picture("A"), text("x" * num_chars)],
        "behind": [text("x" * num_chars), picture("A")],
        "alone": [picture("A")],
    }[side]
    messages = [{"role": "user", "content": parts}]
    promised = labels(messages, order)
    if order == "as sent" or side == "alone":
        assert max(promised.values()) >= len(found(messages, order)) - 64
        assert any(count > NUM_ROWS for count in promised.values())
    changed = [picture("B") if part["type"] != "text" else part for part in parts]
    other = [{"role": "user", "content": changed}]
    canonical = route_keys.canonical({"messages": other}, kind="chat")
    assert canonical is not None
    most = num_common(messages, other, order) + BLOCK_SIZE
    assert all(promised.get(name, 0) <= most for name in route_keys.lookup_keys(canonical))


def test_parts_that_are_not_the_prompts_pictures_are_not_placed() -> None:
    messages = [{"role": "user", "content": [picture("A"), {"type": "refusal"}]}]
    canonical = route_keys.canonical({"messages": messages}, kind="chat")
    assert canonical is not None
    ends = np.arange(1, 9)
    first, second = PicturePlace(0, 4, 64), PicturePlace(4, 8, 64)
    assert place_pictures(canonical, ends, [first]) is None
    assert place_pictures(canonical, ends, [first, second]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "smolvlm"])
def test_a_repeated_picture_is_predicted_over_the_api(tmp_path: Path, name: str) -> None:
    asyncio.run(_predicted(tmp_path, name))


async def _predicted(tmp_path: Path, name: str) -> None:
    folder = write_seeing_model(tmp_path / name, name)
    num_tokens = {"llava": 36, "smolvlm": 114}[name]  # of a picture
    red, blue = (
        {
            "type": "image_url",
            "image_url": {"url": data_url(encoded(Image.new("RGB", (80, 60), c)))},
        }
        for c in ("red", "blue")
    )
    lead, short = text(" ".join(["tell me more of this"] * 12)), text("what is it ?")
    many = [red, red, blue, red, red][: 480 // num_tokens]
    config = EngineConfig(model=str(folder), num_threads=1, dtype="float32")
    cached = []
    async with bench(config, in_process) as server:
        figures = server.figures
        for parts in (
            [red, lead], [blue, lead], [red, lead], [*many, short], [*many, short],
            [short, *many], [*many, text("it is red")], [*many[:2], red, short],
        ):  # fmt: skip
            before = figures.cached
            await server.ask(
                "chat", {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
            )
            cached.append(figures.cached - before)
    # The template writes pictures first: that this prompt is known already, no key says.
    assert cached[5] + figures.errors.pop(5) <= BLOCK_SIZE
    assert max(map(abs, figures.errors)) <= BLOCK_SIZE, figures.errors
    assert cached[1] < BLOCK_SIZE  # another picture
    assert cached[2] > num_tokens + BLOCK_SIZE
    assert min(cached[4], cached[6]) > len(many) * num_tokens
    assert 2 * num_tokens < cached[7] < 3 * num_tokens
