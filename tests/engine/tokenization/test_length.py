"""What is surely too long is told from its bytes, and never of a text that would fit.

Red when: a bound is above what a text really has, or long texts hold the interpreter's lock.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from octavo_engine.errors import ContextLengthExceeded
from octavo_engine.tokenization.length import LeastTokens
from octavo_engine.tokenization.text_tokenizer import TextTokenizer
from octavo_engine.tokenization.threads import LONG_CHARS, off_loop
from octavo_engine.tokenization.token_pieces import Spelling
from octavo_engine.tokenization.tokenizer import check_length

if TYPE_CHECKING:
    from collections.abc import Callable


@settings(max_examples=200, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(text=st.text(max_size=200) | st.text("1 a\n\x04\u0301e", max_size=400))
def test_no_text_has_fewer_tokens_than_the_bound(smollm2, fallback_vocabulary, text):
    fallback = TextTokenizer(fallback_vocabulary, where="test")
    for tokenizer in (smollm2, fallback):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.least_tokens(text) <= len(ids)


def test_the_bound_is_of_use(smollm2):
    assert smollm2.least_tokens("1" * 2_000_000) > 8192


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "normalizer", normalizers.NFKC()),
        lambda t: setattr(t, "normalizer", normalizers.Strip()),
        lambda t: setattr(t, "normalizer", normalizers.Replace("a", "")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split("x", "removed")),
    ],
    ids=["nfkc", "strip", "replace", "whitespace", "split"],
)
def test_where_text_may_be_lost_nothing_is_said(
    fallback_vocabulary: Tokenizer, change: Callable[[Tokenizer], None]
) -> None:
    tokenizer = Tokenizer.from_str(fallback_vocabulary.to_str())
    assert LeastTokens(tokenizer, [], Spelling.SENTENCEPIECE)("a" * 1000) > 0
    change(tokenizer)
    assert LeastTokens(tokenizer, [], Spelling.SENTENCEPIECE)("a" * 1000) == 0


def test_a_vocabulary_without_all_bytes_says_nothing(metaspace_vocabulary: Tokenizer) -> None:
    assert TextTokenizer(metaspace_vocabulary, where="test").least_tokens("a" * 1000) == 0


def test_white_space_that_a_token_swallows_does_not_count(fallback_vocabulary: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(fallback_vocabulary.to_str())
    tokenizer.add_tokens([AddedToken("<end>", special=True, rstrip=True, normalized=False)])
    text = "<end>" + " " * 5000
    wrapped = TextTokenizer(tokenizer, where="test")
    assert wrapped.least_tokens(text) <= len(wrapped.encode(text, add_special_tokens=False)) < 5
    assert wrapped.least_tokens("h" * 5000) > 100


def test_a_text_that_is_surely_too_long_is_refused_with_the_numbers(smollm2):
    check_length(smollm2, "a" * 8192, 8192, "prompt")
    with pytest.raises(ContextLengthExceeded, match=r"8192 tokens.* 2000000 characters") as caught:
        check_length(smollm2, "1" * 2_000_000, 8192, "prompt")
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded):
        smollm2.render_chat(
            [{"role": "user", "content": "1" * 2_000_000}],
            template=smollm2.chat_template,
            max_tokens=8192,
        )


def test_a_batch_of_one_gives_the_same_ids(smollm2):
    text = "One 11 text, naïve\u0301 and <|im_start|> long enough. " * 200
    plain = smollm2._tokenizer.encode(text, add_special_tokens=True).ids
    assert smollm2.encode(text) == plain
    assert smollm2.encode_batch([text, "x"], add_special_tokens=False)[1] == smollm2.encode("x")


@pytest.mark.slow
def test_reading_a_long_text_stops_no_other_thread(smollm2):
    """The longest time for which another thread could not run, as a share of what reading took."""
    text = "1" * 400_000

    def longest_gap(work: Callable[[], Any]) -> float:
        gaps, done = [0.0], threading.Event()

        def watch() -> None:
            last = time.perf_counter()
            while not done.is_set():
                time.sleep(0.0005)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        thread = threading.Thread(target=watch)
        thread.start()
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        done.set()
        thread.join()
        return max(gaps) / took

    assert min(longest_gap(lambda: smollm2.encode(text)) for _ in range(3)) < 0.4
    message = [{"role": "user", "content": text}]
    template = smollm2.chat_template
    rendered = (longest_gap(lambda: smollm2.render_chat(message, template=template)) for _ in "abc")
    assert min(rendered) < 0.4


async def _where(num_chars: int) -> str:
    return await off_loop(lambda: threading.current_thread().name, num_chars)


def test_the_longest_texts_are_read_one_after_the_other_in_a_thread_of_their_own():
    import asyncio

    async def story() -> list[str]:
        sizes = (10, LONG_CHARS, LONG_CHARS + 1, LONG_CHARS + 1, 10 * LONG_CHARS)
        return [await _where(size) for size in sizes]

    here, short, *long = asyncio.run(story())
    assert here == threading.current_thread().name
    assert short.startswith("octavo-texts-")
    assert len(set(long)) == 1 and long[0] == "octavo-text-0"


def test_facts_are_read_from_the_parts_as_they_say_them(fallback_vocabulary: Tokenizer) -> None:
    """The tokenizer library may rename what the bound is read from: then this tells."""
    fields = json.loads(fallback_vocabulary.normalizer.__getstate__())
    assert fields["type"] == "Sequence" and len(fields["normalizers"]) == 2
