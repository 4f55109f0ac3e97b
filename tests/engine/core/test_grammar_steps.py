"""Grammars in the step loop: whatever happens to a sequence, its answer is what its mask allows.

The fake backend knows the truth of every prefix, and a choice's mask can be written down by hand,
so an answer can be told in advance, token by token.
"""

from __future__ import annotations

import json
import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.normal import regex_spec
from octavo_engine.grammar.run import GrammarRun
from octavo_engine.sampling.batch import MaskRows
from octavo_engine.tokenization.bytes_tokenizer import EOS
from tests.fakes.grammar_rig import CHOICE, CHOICES, FIXED, SPECS, Rig
from tests.fakes.requests import make_prompt, make_request
from tests.kernels import sampling_reference

if TYPE_CHECKING:
    from octavo_engine.state.grammar import GrammarSpec
    from octavo_engine.state.request import EngineRequest
    from tests.fakes.backend import FakeBackend


class FixedMask:
    def __init__(self, ids: list[int]) -> None:
        bits = np.zeros(512, np.uint8)
        bits[ids] = 1
        self._mask = np.packbits(bits, bitorder="little").view(np.uint32)[None]

    def take(self) -> MaskRows:
        return MaskRows(np.zeros(1, np.int32), self._mask)


def expected_choice(backend: FakeBackend, request: EngineRequest) -> list[int]:
    """Token by token, from the logits and a mask made by hand."""
    from octavo_engine.sampling.batch import SamplingBatch
    from octavo_engine.sampling.rows import fill_row, new_table

    table = new_table(1)
    fill_row(table, 0, request)
    tokens, text = list(request.prompt_token_ids), b""
    while True:
        following = [c.encode() for c in CHOICES if c.encode().startswith(text)]
        allowed = {c[len(text)] for c in following if len(c) > len(text)}
        if text in following:
            allowed.add(EOS)
            if allowed == {EOS}:
                return tokens[len(request.prompt_token_ids) :]
        batch = SamplingBatch(
            table=table,
            rows=np.zeros(1, np.int32),
            positions=np.array([len(tokens)], np.int32),
            targets=np.array([-1], np.int32),
            history=np.array([tokens], np.int32),
            masks=FixedMask(sorted(allowed)),
        )
        token = int(sampling_reference.sample(backend.logits(tokens)[None].copy(), batch).tokens[0])
        tokens.append(token)
        if token == EOS:
            return tokens[len(request.prompt_token_ids) :]
        text += bytes([token])


@pytest.mark.parametrize("is_jumping", [True, False])
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_answers_are_what_a_mask_written_by_hand_gives(is_jumping: bool, num_blocks: int) -> None:
    rig = Rig(num_blocks=num_blocks, is_jumping=is_jumping)
    rig.add(CHOICE)
    rig.run()  # it is compiled: from here on nothing depends on how long that takes
    requests = [
        make_request(
            7 + 5 * seed, eos=(EOS,), grammar=CHOICE, max_tokens=60, seed=seed,
            temperature=[0.0, 1.0, 3.0][seed % 3],
            repetition_penalty=[1.0, 1.4][seed % 2], presence_penalty=[0.0, 0.7][seed % 2],
        )
        for seed in range(12)
    ]  # fmt: skip
    for request in requests:
        rig.take(request)
    scheduler = rig.engine.scheduler
    while rig.engine.has_work:
        rig.step()
        if num_blocks == 8 and scheduler.running and rig.backend.num_steps % 2 == 0:
            scheduler._preempt(scheduler.running[-1])
    answers = rig.run()
    endings = set()
    for request in requests:
        answer = answers[request.request_id]
        assert answer.tokens == expected_choice(rig.backend, request)
        assert answer.text in CHOICES and answer.reason == "stop"
        assert answer.is_whole == (answer.tokens[-1] != EOS)
        endings.add(answer.is_whole)
    assert endings == {True, False}, "by itself, and by end of text"
    if num_blocks == 8:
        assert rig.engine.stats().preemptions > 10


def test_forced_tokens_cost_no_steps() -> None:
    rig, one_by_one = Rig(), Rig(is_jumping=False)
    for each in (rig, one_by_one):
        each.add(FIXED, seed=5, request_id="a")
        each.run()
    jumped, sampled = rig.answers["a"], one_by_one.answers["a"]
    assert jumped.tokens == sampled.tokens and jumped.reason == sampled.reason == "stop"
    assert json.loads(jumped.text)["kind"] == "a rather long constant"
    assert jumped.num_outputs < 8 < 39 < sampled.num_outputs
    assert rig.backend.num_steps < one_by_one.backend.num_steps


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_jumping_changes_nothing(seed: int) -> None:
    """The same tokens and ends, in a small pool, with all that may be wished of a request."""
    rng = random.Random(seed)
    wishes: list[dict[str, Any]] = []
    stem = make_prompt(40)
    for index in range(14):
        wish: dict[str, Any] = {
            "spec": rng.choice(SPECS),
            "prompt": stem[: rng.randrange(1, 40)],
            "request_id": str(index),
            "seed": rng.randrange(100),
            "temperature": rng.choice([0.0, 1.0]),
            "max_tokens": rng.choice([1, 5, 30, 70]),
        }
        extras: list[dict[str, Any]] = rng.sample(
            [
                {"logprobs": 2}, {"min_tokens": 1}, {"ignore_eos": True}, {"prompt_logprobs": 1},
                {"logit_bias": {120: 3.0}}, {"stop_token_ids": (98, 34)}, {"top_p": 0.8},
                {"frequency_penalty": 1.0}, {"repetition_penalty": 1.5},
                {"allowed_token_ids": tuple(range(32, 290))},
            ], rng.randrange(3),
        )  # fmt: skip
        for extra in extras:
            wish |= extra
        wishes.append(wish)
    results = []
    for is_jumping, blocks, budget in (
        (True, 9, 16),
        (False, 9, 16),
        (True, 60, 7),
        (True, 60, 32),
    ):
        rig = Rig(
            num_blocks=blocks, is_jumping=is_jumping, max_num_batched_tokens=budget,
            enable_prefix_caching=budget != 7,
        )  # fmt: skip
        order = list(wishes)
        rng.shuffle(order)
        for index, wish in enumerate(order):
            wish = dict(wish)
            if wish["min_tokens" if "min_tokens" in wish else "max_tokens"] > wish["max_tokens"]:
                continue
            rig.add(wish.pop("spec"), **wish)
            if index % 3 == 0:
                rig.step()
        answers = rig.run()
        results.append(
            {
                name: (a.tokens, a.reason, a.is_whole, a.error, a.logprobs)
                for name, a in answers.items()
            }
        )
    for other in results[1:]:
        assert other == results[0]


@pytest.mark.parametrize("spec", [FIXED, CHOICE, regex_spec("(yes|yellow) indeed", after="no")])
def test_a_resume_goes_on_wherever_it_broke(spec: GrammarSpec) -> None:
    whole = Rig()
    if spec.after:
        whole.add(spec, request_id="a", allowed_token_ids=tuple(b"no yesindlw"), max_tokens=120)
    else:
        whole.add(spec, request_id="a")
    extra: dict[str, Any] = (
        {"allowed_token_ids": tuple(b"no yesindlw"), "max_tokens": 120} if spec.after else {}
    )
    answer = whole.run()["a"]
    assert answer.reason == "stop"
    length = len(answer.tokens)
    for known in sorted({*range(1, length, max(1, length // 7)), length}):
        rig = Rig()
        rig.add(spec, request_id="a", output=answer.tokens[:known], **extra)
        resumed = rig.run()["a"]
        assert answer.tokens[:known] + resumed.tokens == answer.tokens
        assert (resumed.reason, resumed.is_whole) == ("stop", answer.is_whole)


def test_a_resume_that_broke_the_grammar_is_refused() -> None:
    rig = Rig()
    rig.add(CHOICE, output=list(b"forts"), request_id="a")
    answer = rig.run()["a"]
    assert isinstance(answer.error, InvalidRequest) and answer.error.param == "tokens"


def test_max_tokens_cuts_forced_tokens_too() -> None:
    for max_tokens in (1, 2, 7, 20):
        rig = Rig()
        rig.add(FIXED, request_id="a", max_tokens=max_tokens)
        answer = rig.run()["a"]
        assert len(answer.tokens) == max_tokens and answer.reason == "length"
        assert '{"kind":"a rather long constant"'.startswith(answer.text)


def test_a_conflict_fails_that_request_alone() -> None:
    rig = Rig()
    rig.add(CHOICE, request_id="never", allowed_token_ids=(120,))
    rig.add(CHOICE, request_id="well")
    rig.add(None, request_id="plain", max_tokens=9)
    answers = rig.run()
    assert answers["never"].reason == "error" and answers["never"].tokens == []
    assert answers["well"].text in CHOICES
    assert answers["plain"].tokens and rig.engine.stats().num_running == 0
    assert rig.engine.stats().nan_failures == 0  # the model is not to blame


def test_a_forced_token_that_the_request_forbids_fails_it_either_way() -> None:
    for is_jumping in (True, False):
        rig = Rig(is_jumping=is_jumping)
        rig.add(FIXED, request_id="a", logit_bias={ord("l"): float("-inf")})
        answer = rig.run()["a"]
        assert (answer.text, answer.reason) == ('{"kind":"a rather ', "error")


def test_the_grammar_begins_after_a_text() -> None:
    rig = Rig()
    spec = regex_spec("[0-9]{3}", after="ab")
    rig.add(spec, request_id="a", max_tokens=200, allowed_token_ids=(*b"ab0123", EOS))
    answer = rig.run()["a"]
    before, _, after = answer.text.partition("ab")
    assert answer.reason == "stop" and len(after) == 3 and after.isdigit()
    assert EOS not in answer.tokens and "ab" not in before


def test_a_late_mask_delays_its_sequence_only() -> None:
    """The step goes on without it; nothing is sampled for it, and nothing is lost."""
    plain = Rig()
    plain.add(CHOICE, request_id="a", seed=3)
    truth = plain.run()["a"].tokens
    rig = Rig()
    rig.grammars.workers.patience_s = 0.0
    gate = threading.Event()
    prepare = GrammarRun.prepare
    num_late = 0

    def slowly(run: GrammarRun) -> None:
        nonlocal num_late
        if num_late < 3:
            num_late += 1
            gate.wait(30)
            gate.clear()
        prepare(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarRun, "prepare", slowly)
        rig.add(CHOICE, request_id="a", seed=3)
        rig.add(None, request_id="plain", max_tokens=200)
        while rig.answers["a"].reason is None:
            before = len(rig.answers["plain"].tokens)
            for _ in range(3):
                rig.step()
            assert rig.answers["plain"].reason or len(rig.answers["plain"].tokens) > before
            gate.set()
    assert rig.answers["a"].tokens == truth and num_late == 3
    rig.run()


def test_specs_cross_the_wire_as_they_are() -> None:
    request = make_request(3, grammar=FIXED)
    raw = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(raw, type=type(request)) == request
