"""One answer's way: masks, forced tokens, the end, and a grammar that begins after a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from llguidance import LLMatcher

from octavo_engine.grammar.masks import MaskWorkers, StepMasks
from octavo_engine.grammar.normal import (
    anything_spec,
    choice_spec,
    json_schema_spec,
    regex_spec,
)
from octavo_engine.grammar.prelude import BeforeMasks
from octavo_engine.grammar.run import GrammarRun
from octavo_engine.grammar.vocabulary import Vocabulary
from octavo_engine.tokenization.bytes_tokenizer import EOS, ByteTokenizer
from tests.engine.grammar.walking import matcher, vocabulary

if TYPE_CHECKING:
    from octavo_engine.state.grammar import GrammarSpec

WORKERS = MaskWorkers()


def start(spec: GrammarSpec, **options: Any) -> GrammarRun:
    return GrammarRun(matcher(spec), vocabulary(), WORKERS, **options)


def allowed(run: GrammarRun) -> list[int]:
    run.prepare()
    assert run.mask is not None
    return np.flatnonzero(np.unpackbits(run.mask.view(np.uint8), bitorder="little")).tolist()


def accept_all(run: GrammarRun, text: bytes) -> None:
    for token in text:
        run.accept(token)


def test_ids_that_only_the_model_has_are_never_allowed() -> None:
    run = start(regex_spec(r"(.|\n)*"), is_jumping=False)
    ids = allowed(run)
    assert EOS in ids and max(ids) < 300 <= 310 and 256 not in ids


def test_the_end_of_text_is_allowed_where_the_text_may_end_only() -> None:
    run = start(regex_spec("ab?"), stop_token_ids=(120,))
    assert allowed(run) == [ord("a")]
    run.accept(ord("a"))
    assert allowed(run) == [ord("b"), 120, EOS]
    run.accept(ord("b"))
    assert run.is_complete and run.error is None


def test_ignoring_the_end_of_text_goes_on_until_nothing_can_follow() -> None:
    run = start(regex_spec("a{1,3}"), ignore_eos=True, is_jumping=False)
    for expected in (False, False, True):
        assert allowed(run) == [ord("a")]
        run.accept(ord("a"))
        assert run.is_complete == expected


def test_forced_tokens_are_those_that_stand_alone() -> None:
    run = start(choice_spec(["forty-two", "forty-one"]))
    assert allowed(run) == [ord("f")]
    assert bytes(run.forced) == b"orty-"
    accept_all(run, b"forty-")
    assert run.is_ready, "what follows is known already"
    assert allowed(run) == [ord("o"), ord("t")]
    run.accept(ord("t"))
    assert allowed(run) == [ord("w")] and bytes(run.forced) == b"o"
    accept_all(run, b"wo")
    assert run.is_complete


def test_a_forced_run_ends_where_the_text_could() -> None:
    run = start(choice_spec(["aa", "aab"]))
    assert allowed(run) == [ord("a")] and bytes(run.forced) == b"a"
    accept_all(run, b"aa")
    assert allowed(run) == [ord("b"), EOS] and run.forced == []


def test_a_token_that_is_not_allowed_ends_it_with_an_error() -> None:
    for is_jumping in (True, False):
        run = start(choice_spec(["abc"]), is_jumping=is_jumping)
        allowed(run)
        run.accept(ord("x"))
        assert run.error is not None and not run.is_complete
        assert allowed(run) == []


def test_replaying_stops_at_an_end_of_text() -> None:
    run = start(regex_spec("a+"))
    run.replay([ord("a"), ord("a"), EOS])
    assert run.error is None and EOS in allowed(run)


class Words(ByteTokenizer):
    """Some tokens of several bytes, as real vocabularies have them."""

    words = (b"</", b"think", b">", b"</think>", b"</think>\n", b">{", b"x</th", b"k>", b"nk>1")

    def __init__(self) -> None:
        super().__init__(300)

    def token_bytes(self, token_id: int) -> bytes:
        if 260 <= token_id < 260 + len(self.words):
            return self.words[token_id - 260]
        return super().token_bytes(token_id) if token_id < 258 else b""


@pytest.mark.parametrize(
    "pieces",
    [
        [b"h", b"m", b"</think>"],
        [b"</", b"think", b">"],
        [b"x</th", b"i", b"n", b"k>"],
        [b"<", b"<", b"/", b"think", b">"],
        [b"</", b"</", b"think", b">"],
        [b"x</th", b"x</th", b"i", b"n", b"k>"],
    ],
)
def test_what_comes_before_is_found_however_it_is_cut(pieces: list[bytes]) -> None:
    words = Vocabulary(Words(), vocab_size=300)
    before = BeforeMasks(words, b"</think>")
    ids = {words.words[i]: i for i in range(300) if words.words[i]}
    run = GrammarRun(matcher(regex_spec("[0-9]")), words, WORKERS, before=before)
    for place, piece in enumerate(pieces):
        tokens = allowed(run)
        assert ids[piece] in tokens and EOS not in tokens and run.forced == []
        # No token may carry the text and something behind it: that belongs to the grammar.
        text = b"".join(pieces[:place])
        for token in range(260, 300):
            word = words.words[token]
            beyond = b"</think>" in (text + word)[:-1]
            assert (token in tokens) == (bool(word) and not beyond), word
        run.accept(ids[piece])
    assert allowed(run) == list(b"0123456789")


def test_tokens_that_go_beyond_are_found_from_every_state() -> None:
    class Overlapping(Words):
        words = (b"aba", b"bab", b"ba", b"abab", b"ababx", b"bx", b"babx", b"bb", b"abx")

    words = Vocabulary(Overlapping(), vocab_size=300)
    for after in (b"abab", b"aab", b"ab"):
        before = BeforeMasks(words, after)
        for state in range(len(after)):
            mask = np.unpackbits(before.mask(state).view(np.uint8), bitorder="little")
            for token in range(260, 269):
                beyond = after in (after[:state] + words.words[token])[:-1]
                assert bool(mask[token]) != beyond, (after, state, words.words[token])


def test_random_texts_before_are_followed_as_searching_would() -> None:
    rng = np.random.default_rng(7)
    for after in (b"aab", b"aa", b"abab", b"a", b"abaabaaab"):
        before = BeforeMasks(vocabulary(), after)
        for _ in range(50):
            state, text = 0, b""
            for byte in rng.choice(list(b"ab"), 30).tolist():
                state = before.follow(state, bytes([byte]))
                text += bytes([byte])
                assert (state == len(after)) == text.endswith(after)
                longest = max(n for n in range(len(after) + 1) if text.endswith(after[:n]))
                assert state == longest
                if state == len(after):
                    break


def test_a_wait_whose_tokens_are_used_up_is_ended_with_the_longest_pieces() -> None:
    words = Vocabulary(Words(), vocab_size=300)
    ids = {words.words[i]: i for i in range(300) if words.words[i]}
    before = BeforeMasks(words, b"</think>", budget=2)
    for thoughts, rest in (
        ([b"h", b"m"], [b"</think>"]),
        ([b"h", b"</"], [b"think", b">"]),
        ([b"</", b"think"], [b">"]),
    ):
        run = GrammarRun(matcher(regex_spec("[0-9]")), words, WORKERS, before=before)
        for piece in thoughts:
            assert len(allowed(run)) > 200
            run.accept(ids[piece])
        for piece in rest:
            assert allowed(run) == [ids[piece]]
            run.accept(ids[piece])
        assert allowed(run) == list(b"0123456789")


def test_a_budget_counts_from_where_thoughts_begin_and_asks_nothing_without_them() -> None:
    before = BeforeMasks(vocabulary(), b"</t>", budget=1, opens=(b"<t>", b"[t]"))

    def after(text: bytes) -> list[int]:
        run = GrammarRun(matcher(anything_spec()), vocabulary(), WORKERS, before=before)
        for byte in text:
            assert byte in allowed(run)
            run.accept(byte)
        return allowed(run)

    assert after(b"\n[t]x") == after(b"<t>x") == [ord("<")]
    assert after(b"<t>x</t") == [ord(">")]
    for free in (b"", b" <", b"no", b"<tx", b"<t>x</t>", b"<t></t>yes"):
        assert EOS in after(free) and len(after(free)) > 200


def test_a_mask_that_is_late_leaves_its_row_out() -> None:
    workers = MaskWorkers(patience_s=0.0)
    run = GrammarRun(matcher(choice_spec(["ab"])), vocabulary(), workers)
    ready = GrammarRun(matcher(choice_spec(["xy"])), vocabulary(), workers)
    ready.prepare()
    run.is_started = ready.is_started = True  # somebody else is at it
    masks = StepMasks([run, ready], [range(1, 2), range(1)], 3)
    rows, bits = masks.take()
    assert masks.late == [0] and rows.tolist() == [0, -1, -1] and len(bits) == 1
    workers.close()


def test_a_slow_mask_is_begun_before_its_sequence_is_scheduled(monkeypatch) -> None:
    monkeypatch.setattr("octavo_engine.grammar.run.SLOW_S", -1.0)
    workers = MaskWorkers()
    spec = json_schema_spec({"type": "string", "pattern": "^[a-c]+$"})
    run = GrammarRun(matcher(spec), vocabulary(), workers, is_jumping=False)
    run.prepare()
    assert run.is_slow
    run.accept(ord('"'))
    assert not run.is_started, "more tokens may follow, and nobody else may touch it meanwhile"
    run.start_slow_mask()
    assert run.is_started, "nobody had to ask"
    workers.close()  # waits for it
    assert run.is_ready and run.mask is not None


def test_a_vocabulary_without_an_end_of_text() -> None:
    class Endless(ByteTokenizer):
        eos_token_ids: tuple[int, ...] = ()
        special_ids = frozenset((256,))

    words = Vocabulary(Endless(256 + 2), vocab_size=258)
    assert words.eos_token_ids == ()
    made = LLMatcher(words.compiler_tokenizer, LLMatcher.grammar_from_regex("ab"), log_level=0)
    run = GrammarRun(made, words, WORKERS)
    assert allowed(run) == [ord("a")] and bytes(run.forced) == b"b"
    accept_all(run, b"ab")
    assert run.is_complete
