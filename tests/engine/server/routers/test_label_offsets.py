"""How many tokens a route key stands for: places in the data, in the prompt, in the tokens.

Red when: a text is placed behind where it is; a token counts that ends behind the place, or that
may merge with what follows; a label hangs on a block that its prefix does not fill; a text that is
not in the prompt does not end it; a message with other fields counts before it is complete.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol import route_keys
from octavo_engine.server.routers.label_offsets import TokenEnds, label_ids, label_text, locate
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from octavo_engine.state.labels import Labels


def canonical(*messages: Any) -> route_keys.Canonical:
    body = {"messages": [m if isinstance(m, dict) else said(m) for m in messages]}
    reduced = route_keys.canonical(body, kind="chat")
    assert reduced is not None
    return reduced


def said(text: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def places(reduced: route_keys.Canonical, text: bytes) -> list[tuple[int, int]]:
    found = locate(reduced, len(reduced.data) // 64, text)
    return list(zip(found.low.tolist(), found.high.tolist(), strict=True))


def unpack(labels: Labels | None) -> list[tuple[int, int, int]]:
    """(name, tokens, block) each."""
    assert labels is not None
    entries = struct.iter_unpack("<QI", labels.entries)
    blocks = np.frombuffer(labels.blocks, np.uint32).tolist()
    return [(name, tokens, block) for (name, tokens), block in zip(entries, blocks, strict=True)]


def test_inside_a_text_a_place_is_exact():
    text = "x" * 200
    reduced = canonical(text)  # its text begins after a mark, "user" and another mark
    assert places(reduced, b"<user>" + text.encode() + b"</user>") == [
        (6 + 64 - 6, 6 + 64 - 6), (6 + 128 - 6, 6 + 128 - 6), (6 + 192 - 6, 6 + 192 - 6),
    ]  # fmt: skip


def test_between_two_texts_a_place_is_a_range():
    reduced = canonical("a" * 57, "b" * 60)  # the first chunk ends with the second one's mark
    prompt = b"<<" + b"a" * 57 + b">>--<<" + b"b" * 60 + b">>"
    assert places(reduced, prompt)[0] == (2 + 57, 2 + 57 + 6)


def test_a_text_that_the_template_trims_is_found():
    reduced = canonical("  \n" + "a" * 100 + "  ", "b" * 100)
    prompt = b"<" + b"a" * 100 + b">" + b"b" * 100
    first, second, third = places(reduced, prompt)
    assert first == (1 + 64 - 6 - 3, 1 + 64 - 6 - 3)
    assert second == (102 + 128 - 117, 102 + 128 - 117)
    assert third[0] == 102 + 192 - 117


def test_a_text_is_never_placed_behind_its_true_place():
    """The word stands in the template too: then the first place is taken, and less is promised."""
    reduced = canonical("user", "c" * 100)
    prompt = b"<user>user</user><user>" + b"c" * 100
    assert locate(reduced, 1, prompt).opening == 1
    assert places(reduced, prompt) == [(23 + 64 - 16, 23 + 64 - 16)]


def test_a_text_that_is_not_there_ends_what_is_known():
    reduced = canonical("a" * 100, "b" * 100, "c" * 100)
    prompt = b"a" * 100 + b"B" * 100 + b"c" * 100
    found = locate(reduced, len(reduced.data) // 64, prompt)
    assert (found.num_known, found.is_whole) == (1, False)


def test_a_message_with_other_fields_counts_when_it_is_complete():
    """A template may write a name, or what was thought, before the text."""
    reduced = canonical(said("a" * 100, name="n" * 40), "b" * 100)
    prompt = b"n" * 40 + b"a" * 100 + b"b" * 100
    offset = 140 - reduced.spans[1].start
    lows = [low for low, _ in places(reduced, prompt)]
    assert lows == [0, 0, 192 + offset, 256 + offset]


def test_token_ids_are_their_own_measure():
    assert unpack(label_ids([7, 8, 9])) == [(7, 16, 0), (8, 32, 1), (9, 48, 2)]


def test_bytes_are_tokens_exactly():
    reduced = canonical("x" * 250)
    prompt = b"<|user|>\n" + b"x" * 250 + b"\n<|assistant|>\n"
    ends = TokenEnds(ByteTokenizer(), 512)(list(prompt), prompt)
    assert ends.tolist() == list(range(1, len(prompt) + 1))
    keys = route_keys.chain(reduced.root, reduced.data)
    names = [route_keys.opening(reduced), *keys]
    labels = unpack(label_text(reduced, names, prompt, ends, merges=False))
    # The first chunk ends after 58 of the text: 67 tokens, four blocks, a bit more on the next.
    assert [(t, b) for name, t, b in labels if name == keys[0]] == [
        (16, 0), (32, 1), (48, 2), (80, 3), (83, 4),
    ]  # fmt: skip


def test_a_first_token_that_begins_texts_spells_nothing():
    prompt = b"hello world"
    ends = TokenEnds(ByteTokenizer(), 512)([256, *prompt], prompt)
    assert ends.tolist() == list(range(len(prompt) + 1))


def test_tokens_that_spell_another_text_say_nothing():
    ends = TokenEnds(ByteTokenizer(), 512)(list(b"x" * 300), b"short")
    assert len(ends) == 0
    reduced = canonical("x" * 300)
    assert label_text(reduced, [0, 1], b"short", ends) is None


def test_tokens_that_spell_less_than_the_text_count_later():
    """Something was taken out, nobody knows where: at worst before the first token."""
    ends = TokenEnds(ByteTokenizer(), 512)(list(b"abcd"), b"a b c d")
    assert ends.tolist() == [4, 5, 6, 7]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=150), min_size=1, max_size=6), st.data())
def test_no_label_promises_what_another_prompt_would_not_find(texts, data):
    """Two chats that share some chunks share at least the tokens of every label's block."""
    change = data.draw(st.integers(0, len(texts) - 1))
    others = list(texts)
    others[change] = texts[change][: data.draw(st.integers(0, 150))] + "!"
    prompts, reduced = [], []
    for chat in (texts, others):
        prompts.append("".join(f"<|user|>\n{text}\n" for text in chat).encode())
        reduced.append(canonical(*chat))
    keys = [route_keys.chain(r.root, r.data) for r in reduced]
    ends = TokenEnds(ByteTokenizer(), 512)(list(prompts[0]), prompts[0])
    labels = label_text(reduced[0], [0, *keys[0]], prompts[0], ends, merges=False)
    if labels is None:
        return
    pairs = zip(prompts[0], prompts[1], strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, prompts)))
    for name, tokens, block in unpack(labels):
        assert tokens > 0
        assert 16 * (block + 1) <= max(len(prompts[0]), 16)
        if name in keys[1]:
            assert tokens - shared <= 16


@pytest.mark.parametrize("num_messages", [1, 3])
def test_labels_are_in_the_order_of_their_blocks(num_messages):
    reduced = canonical(*("word " * 60 for _ in range(num_messages)))
    prompt = b"".join(b"<|user|>\n" + b"word " * 60 for _ in range(num_messages))
    ends = np.arange(5, len(prompt) + 1, 5)
    keys = route_keys.chain(reduced.root, reduced.data)
    labels = unpack(label_text(reduced, [1, *keys], prompt, ends))
    blocks = [block for *_, block in labels]
    assert blocks == sorted(blocks)
    assert set(range(max(blocks))) <= set(blocks), "a block without a name is held by nobody"
