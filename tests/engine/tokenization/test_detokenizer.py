"""Incremental text: pieces that add up to the whole, and no half characters on the way."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer
from octavo_engine.tokenization.detokenizer import Detokenizer
from octavo_engine.tokenization.text_tokenizer import TextTokenizer

TEXTS = [
    "plain words",
    "  two spaces first",
    "naïve façade, 中文字符, 日本語, 한국어",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇫🇷",
    "e\u0301 combining e\u0301\u0323, zalgo z\u0337\u0321",
    "tabs\tand\nnew\r\nlines\n\n",
    "עברית and العربية, ไทย",
    "<|im_start|>user\nhi<|im_end|>",
]


def pieces(detokenizer, ids, cuts):
    shown, position = [], 0
    for cut in [*cuts, len(ids)]:
        shown.append(detokenizer.push(ids[position:cut]))
        position = max(position, cut)
    shown.append(detokenizer.flush())
    return shown


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_one_token_at_a_time_adds_up(smollm2, text, skip):
    ids = smollm2.encode(text)
    shown = pieces(Detokenizer(smollm2, skip_special_tokens=skip), ids, range(len(ids)))
    assert "".join(shown) == smollm2.decode(ids, skip_special_tokens=skip)
    assert all("\ufffd" not in piece for piece in shown)
    if not skip:
        assert "".join(shown) == text


@settings(max_examples=150, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(ids=st.lists(st.integers(0, 49151), max_size=30), data=st.data(), skip=st.booleans())
def test_any_ids_in_any_cuts_add_up_as_the_reference_decodes_them(smollm2, ids, data, skip):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    shown = "".join(pieces(Detokenizer(smollm2, skip_special_tokens=skip), ids, cuts))
    assert shown == smollm2.decode(ids, skip_special_tokens=skip)
    assert shown == smollm2._tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(text=st.text(max_size=30), data=st.data())
def test_byte_fallback_adds_up(fallback_vocabulary, text, data):
    tokenizer = TextTokenizer(fallback_vocabulary, where="made here")
    ids = tokenizer.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    shown = pieces(Detokenizer(tokenizer), ids, cuts)
    whole = tokenizer.decode(ids)
    assert "".join(shown) == whole == fallback_vocabulary.decode(ids)
    assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text


def test_a_character_waits_for_its_last_byte(fallback_vocabulary):
    tokenizer = TextTokenizer(fallback_vocabulary, where="made here")
    detokenizer = Detokenizer(tokenizer)
    emoji = [3 + byte for byte in "🎉".encode()]
    assert [detokenizer.push([i]) for i in emoji] == ["", "", "", "🎉"]
    assert detokenizer.push(emoji[:2]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_first_space_belongs_to_a_continuation_but_not_to_a_text(fallback_vocabulary):
    tokenizer = TextTokenizer(fallback_vocabulary, where="made here")
    hello = tokenizer.encode("hello")
    assert tokenizer.token_bytes(hello[0]) == b" hello"
    assert Detokenizer(tokenizer).push(hello) == "hello"
    assert Detokenizer(tokenizer, prompt_token_ids=hello).push(hello) == " hello"
    assert Detokenizer(tokenizer, prompt_token_ids=[1]).push(hello) == "hello"  # after <s> only


def test_a_character_that_the_prompt_left_open_is_completed():
    tokenizer = ByteTokenizer()
    prompt, rest = list("x🎉".encode())[:3], list("🎉".encode())[2:]
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt)
    assert detokenizer.push(rest) == "🎉"


def test_ids_that_stand_for_nothing_add_nothing(smollm2):
    assert Detokenizer(smollm2).push([smollm2.vocab_size + 5]) == ""


def test_some_special_tokens_may_be_shown():
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, shown_special_ids=(256,))

    assert detokenizer.push([256, *b"a", 257]) == "<s>a"
