"""Whole, in pieces or resumed: what a client reads is the same. `python -m tests.differential` goes
on with it for as long as one likes."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest

from octavo_engine.config import SchedulerConfig
from tests.differential import streams
from tests.differential.bodies import CHAT, COMPLETIONS
from tests.differential.streams import PLAIN, Pair

pytestmark = pytest.mark.slow

HI: Any = [{"role": "user", "content": "weather?"}]


@pytest.mark.parametrize("seed", range(4))
def test_however_an_answer_comes_about_it_reads_the_same(seed):
    count = streams.compare(random.Random(seed), num_bodies=8, num_cuts=2)
    assert count.answers > 3 and count.resumes > 3


# What was found to differ once.
KNOWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    # The first tokens are half a character: told, but without any text.
    "thoughts that begin with half a character": ("pythonic", CHAT, {
        "messages": HI, "seed": 8, "max_tokens": 8, "logprobs": True, "n": 2,
        "allowed_token_ids": list("🦊".encode())}),
    # Of three answers each has thoughts, and they do not all speak first after a break.
    "sums of thoughts on the way": ("pythonic", CHAT, {
        "messages": HI, "seed": 5, "max_tokens": 9, "n": 3,
        "stream_options": {"continuous_usage_stats": True}}),
    # An end within what may be the opening mark: only the end tells that it is none.
    "thoughts of half a mark": ("hermes", CHAT, {
        "messages": [*HI, {"role": "assistant", "content": "<think>hm"}], "n": 3,
        "max_tokens": 1, "allowed_token_ids": list(b"<"), "seed": 1,
        "continue_final_message": True, "add_generation_prompt": False}),
    # The second choice finds the prompt cached and is quicker than the first, which scores it.
    "a choice that comes before the prompt's scores": ("plain", COMPLETIONS, {
        "prompt": "tell me " * 12 + "\x03", "seed": 15, "max_tokens": 4, "n": 3, "echo": True,
        "logprobs": 1}),
    "a choice without tokens that does": ("plain", COMPLETIONS, {
        "prompt": ["tell me " * 12 + "\x03", "a"], "seed": 15, "max_tokens": 0, "n": 2,
        "echo": True, "logprobs": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_what_differed_once_does_no_more(name):
    speaker, path, body = KNOWN[name]
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
    with ExitStack() as stack:
        pair = Pair(random.Random(0), speaker, stack, PLAIN.replace(scheduler=scheduler))
        pair.check(path, body, num_cuts=40)
        assert pair.count.answers == 1
