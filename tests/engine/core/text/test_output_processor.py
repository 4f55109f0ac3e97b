"""Tokens of the core become text: stop strings, endings, n answers, log-probabilities, resumes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.core.seeds import key
from octavo_engine.core.text.output_processor import OutputProcessor, SettledSubmission
from octavo_engine.core.text.resumed import ResumedOutput
from octavo_engine.errors import (
    DeadlineExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
)
from octavo_engine.state.outputs import SequenceOutput, TokenLogprobs
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer

EOS = 257


def make_processor():
    return OutputProcessor(ByteTokenizer())


def add(processor, *, resume=b"", resumed=(), prompt=b"p", **params):
    submission = SettledSubmission(
        request_id="caller's",
        prompt=prompt.decode(),
        prompt_token_ids=list(prompt),
        params=SamplingParams(**{"max_tokens": 1000, **params}),
        seed=5,
        eos_token_ids=(EOS,),
        resumed=[ResumedOutput(list(resume))] if resume else resumed,
    )
    return processor.add(submission)


def news(sequence, tokens=b"", finish=None, **fields):
    return SequenceOutput(
        request_id=sequence.request_id, token_ids=list(tokens), finish_reason=finish, **fields
    )


def run(text, finish="length", *, portions=1, stop_token_id=None, **params):
    """Feed an answer's bytes in portions; everything that came out, and the aborts asked for."""
    processor = make_processor()
    request, (sequence,) = add(processor, **params)
    tokens = list(text) if isinstance(text, bytes) else text
    whole, aborts, pieces = None, [], []
    for start in range(0, len(tokens), portions):
        part = tokens[start : start + portions]
        last = start + portions >= len(tokens)
        output = news(
            sequence, part, finish if last else None, stop_token_id=stop_token_id if last else None
        )
        aborts += processor.process([output]).aborts
        piece = request.take()
        if piece is not None:
            pieces += [one.text for one in piece.outputs]
            if whole is None:
                whole = piece
            else:
                whole.absorb(piece)
    assert whole is not None
    (answer,) = whole.outputs
    assert "".join(pieces) == answer.text
    return answer, aborts, len(processor)


def test_text_comes_as_it_is_generated():
    answer, aborts, left = run("Grüße".encode())
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("Grüße", "length", None)
    assert (answer.num_tokens, answer.token_ids) == (7, list("Grüße".encode()))
    assert (aborts, left) == ([], 0)


@pytest.mark.parametrize("portions", [1, 2, 3, 100])
def test_a_stop_string_across_tokens_ends_the_answer_at_its_last_token(portions):
    answer, aborts, left = run(b"one two three four", portions=portions, stop=("o th", "zzz"))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("one tw", "stop", "o th")
    assert answer.token_ids == list(b"one two th")  # what came after in the same step is dropped
    assert answer.num_tokens == 10
    assert (len(aborts), left) == (0 if portions == 100 else 1, 0)


def test_the_stop_string_itself_is_kept_when_asked_for():
    answer, _, _ = run(b"one two three", stop=("two",), include_stop_str_in_output=True)
    assert (answer.text, answer.stop_reason) == ("one two", "two")


def test_what_only_looked_like_a_stop_string_comes_out_at_the_end():
    answer, aborts, _ = run(b"abcab", stop=("abd",))
    assert (answer.text, answer.finish_reason, aborts) == ("abcab", "length", [])


def test_a_stop_string_that_begins_in_the_prompt_is_no_match():
    answer, aborts, _ = run(b"OP and on", prompt=b"ST", stop=["STOP"])
    assert (answer.text, answer.finish_reason, aborts) == ("OP and on", "length", [])


def test_stop_strings_are_not_searched_before_min_tokens():
    answer, _, _ = run(b"ab ab ab", stop=("ab",), min_tokens=4)
    # The fifth token completes an "ab" too, but that one began too early.
    assert (answer.text, answer.num_tokens, answer.finish_reason) == ("ab ab ", 8, "stop")


@settings(max_examples=60, derandomize=True)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_the_answer_ends_before_the_first_stop_string_of_its_text(text, stops):
    if not text:
        return
    answer, _, _ = run(text.encode(), stop=tuple(stops))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert answer.text == text
        return
    first_end = min(ends)  # the text is searched as it grows
    met = [stop for stop in stops if text[:first_end].endswith(stop)]
    assert answer.finish_reason == "stop"
    assert answer.text in {text[: first_end - len(stop)] for stop in met}


def test_end_of_text_is_counted_but_not_shown():
    answer, _, _ = run([*b"hi", EOS], "stop")
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hi", "stop", None)
    assert (answer.num_tokens, answer.token_ids) == (3, [*b"hi", EOS])


def test_a_stop_id_is_the_reason_and_its_text_is_shown_only_when_asked_for():
    shown = {True: "hi!", False: "hi"}
    for include, text in shown.items():
        answer, _, _ = run(b"hi!", "stop", stop_token_id=33, include_stop_str_in_output=include)
        assert (answer.text, answer.stop_reason) == (text, 33)


def test_half_a_character_at_the_end_is_replaced_not_lost():
    answer, _, _ = run("ü".encode()[:1])
    assert answer.text == "\N{REPLACEMENT CHARACTER}"


def test_without_detokenising_there_are_tokens_only():
    answer, _, _ = run(b"abc", detokenize=False)
    assert (answer.text, answer.token_ids) == ("", list(b"abc"))


def test_n_answers_are_n_sequences_of_their_own_seeds():
    processor = make_processor()
    request, sequences = add(processor, n=3, seed=5, stop=("x",), prompt_logprobs=1)
    assert len({sequence.seed for sequence in sequences}) == 3
    assert all(s.params.n == 1 and s.params.stop == () for s in sequences)
    assert [s.params.prompt_logprobs for s in sequences] == [1, None, None]
    a, b, c = sequences
    processor.process([news(c, b"C"), news(a, b"A")])
    processor.process([news(b, b"B", "length"), news(a, b"a")])
    piece = request.take()
    assert piece is not None
    assert [(o.index, o.text, o.finished) for o in piece.outputs] == [
        (0, "Aa", False), (1, "B", True), (2, "C", False),
    ]  # fmt: skip
    assert not piece.finished
    processor.process([news(a, b"", "length"), news(c, b"c", "stop")])
    last = request.take()
    assert last is not None and last.finished and request.finished
    assert len(processor) == 0


def test_the_first_answer_of_a_seed_does_not_depend_on_n():
    processor = make_processor()
    _, one = add(processor, n=1)
    _, three = add(processor, n=3)
    assert one[0].seed == three[0].seed


def test_logprobs_carry_text_and_bytes_and_end_with_the_text():
    processor = make_processor()
    request, (sequence,) = add(processor, logprobs=1, stop=("b",))
    entries = [TokenLogprobs(t, -0.5, 1, [t, 0xC3, 99], [-0.5, -1.5, -2.5]) for t in b"abc"]
    processor.process([news(sequence, b"abc", logprobs=entries)])
    piece = request.take()
    assert piece is not None
    logprobs = piece.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == 2  # none for what came after the stop
    assert (logprobs[0].text, logprobs[0].bytes, logprobs[0].rank) == ("a", b"a", 1)
    assert [(c.token_id, c.bytes, c.logprob, c.rank) for c in logprobs[1].top] == [
        (98, b"b", -0.5, 1)
    ]


@pytest.mark.parametrize("sizes", [[8], [1] * 8, [2, 1, 3, 2]])
@pytest.mark.parametrize("stop", [(), ("b!?",)])
def test_each_token_tells_where_it_begins_in_the_text(sizes, stop):
    """Whatever came together, characters that are not whole yet, and text that is held back."""
    processor = make_processor()
    request, (sequence,) = add(processor, logprobs=0, stop=stop)
    raw = "aé🦊b".encode()
    start, seen = 0, []
    for size in sizes:
        tokens = raw[start : start + size]
        entries = [TokenLogprobs(token, -0.5, 1, [], []) for token in tokens]
        processor.process([news(sequence, tokens, logprobs=entries)])
        start += size
        piece = request.take()
        assert piece is not None
        seen += [entry.offset for entry in piece.outputs[0].logprobs or ()]
    assert seen == [0, 1, 1, 2, 2, 2, 2, 3]


def test_a_resumed_answer_tells_them_on_from_what_was_told():
    processor = make_processor()
    raw = "aé🦊b".encode()
    for reported in range(1, len(raw)):
        request, (sequence,) = add(
            processor, resumed=[ResumedOutput(list(raw[:reported]))], logprobs=0
        )
        entries = [TokenLogprobs(token, -0.5, 1, [], []) for token in raw[reported:]]
        processor.process([news(sequence, raw[reported:], logprobs=entries)])
        piece = request.take()
        assert piece is not None and piece.outputs[0].logprobs is not None
        offsets = [entry.offset for entry in piece.outputs[0].logprobs]
        assert offsets == [0, 1, 1, 2, 2, 2, 2, 3][reported:]


def test_prompt_logprobs_come_whole_with_the_first_token():
    processor = make_processor()
    request, (sequence,) = add(processor, prompt=b"xyz", prompt_logprobs=0)
    chunks = [[TokenLogprobs(t, -1.0, 2, [], [])] for t in b"yz"]
    assert processor.process([news(sequence, prompt_logprobs=chunks[0])]).touched == []
    processor.process([news(sequence, b"!", prompt_logprobs=chunks[1], num_cached_tokens=0)])
    piece = request.take()
    assert piece is not None and piece.prompt_logprobs is not None
    assert piece.prompt_logprobs[0] is None
    assert [entry.text for entry in piece.prompt_logprobs if entry is not None] == ["y", "z"]
    processor.process([news(sequence, b"!")])
    later = request.take()
    assert later is not None and later.prompt_logprobs is None


def test_who_asked_for_what_cannot_be_is_told_so():
    processor = make_processor()
    request, (sequence,) = add(processor)
    processor.process([news(sequence, finish="error", error="nothing is left", is_refused=True)])
    assert isinstance(request.error, InvalidRequest) and str(request.error) == "nothing is left"


def test_a_failed_answer_ends_its_request_and_no_other():
    processor = make_processor()
    bad, (first, second) = add(processor, n=2)
    good, (other,) = add(processor)
    done = processor.process([
        news(first, finish="error", error="NaN in its logits"), news(other, b"ok"),
    ])  # fmt: skip
    assert isinstance(bad.error, GenerationFailed) and str(bad.error) == "NaN in its logits"
    assert second.request_id in done.aborts and other.request_id not in done.aborts
    piece = good.take()
    assert piece is not None and piece.outputs[0].text == "ok"
    late, (third,) = add(processor)
    processor.process([news(third, finish="deadline")])
    assert isinstance(late.error, DeadlineExceeded)


@pytest.mark.parametrize("finish", [None, "length"])
@pytest.mark.parametrize("params", [{"n": 2}, {"n": 2, "logprobs": 1}, {"n": 2, "stop": ["x"]}])
def test_output_that_cannot_be_processed_ends_its_request_and_no_other(params, finish, caplog):
    class Tokenizer(ByteTokenizer):
        def token_bytes(self, token_id):
            if token_id == ord("!"):
                raise RuntimeError("unforeseen")
            return super().token_bytes(token_id)

    processor = OutputProcessor(Tokenizer())
    bad, (first, second) = add(processor, **params)
    good, (other,) = add(processor)
    done = processor.process([
        news(first, b"a!", finish), news(second, b"late"), news(other, b"ok", "length"),
    ])  # fmt: skip
    assert isinstance(bad.error, GenerationFailed)
    assert str(bad.error) == "the engine could not read its output: RuntimeError"
    assert "RuntimeError: unforeseen" in caplog.text
    assert (set(done.aborts), len(processor)) == ({first.request_id, second.request_id}, 0)
    assert done.touched == [bad, good] and bad.finished
    piece = good.take()
    assert piece is not None and (piece.outputs[0].text, good.error) == ("ok", None)


def test_a_refused_answer_ends_its_request():
    processor = make_processor()
    request, (first, second) = add(processor, n=2)
    done = processor.refuse(second.request_id, QueueFull("full", retry_after_s=2))
    assert isinstance(request.error, QueueFull)
    assert (done.touched, done.aborts) == ([request], [first.request_id])
    assert processor.refuse(second.request_id, QueueFull("full")).touched == []


def test_abort_ends_with_what_there_is_and_later_news_are_dropped():
    processor = make_processor()
    request, (first, second) = add(processor, n=2)
    processor.process([news(first, b"a", "length"), news(second, "ü".encode()[:1])])
    assert processor.abort(request) == [second.request_id]
    piece = request.take()
    assert piece is not None and piece.finished
    assert [(o.text, o.finish_reason) for o in piece.outputs] == [
        ("a", "length"), ("\N{REPLACEMENT CHARACTER}", "abort"),
    ]  # fmt: skip
    assert processor.process([news(second, b"late", "length")]).touched == []
    assert processor.abort(request) == []


def test_half_a_character_of_an_aborted_answer_is_no_stop_string():
    processor = make_processor()
    request, (sequence,) = add(processor, stop=["\N{REPLACEMENT CHARACTER}", "abc"])
    processor.process([news(sequence, b"ab" + "ü".encode()[:1])])
    processor.abort(request)
    piece = request.take()
    assert piece is not None
    (output,) = piece.outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (
        "ab\N{REPLACEMENT CHARACTER}", "abort", None,
    )  # fmt: skip


def test_all_in_flight_is_lost_with_the_core():
    processor = make_processor()
    requests = [add(processor, n=2)[0] for _ in range(3)]
    lost = processor.lose_all(EngineDead("gone"))
    assert lost == requests and len(processor) == 0
    assert len({id(request.error) for request in lost}) == 3  # each raised on its own


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_resumed_answer_says_exactly_what_was_not_said(cut):
    text = "one tür two".encode()  # a character of two bytes, and a look-alike of the stop string
    stop = ("two!", "wo three")
    full, _, _ = run(text + b" three", stop=stop)
    tokens = (text + b" three")[: full.num_tokens]
    if cut >= len(tokens):
        return
    before, after = tokens[:cut], tokens[cut:]
    processor = make_processor()
    old, (sequence,) = add(processor, stop=stop)
    for token in before:
        processor.process([news(sequence, [token])])
    said = old.take()
    request, (resumed,) = add(processor, stop=stop, resume=before)
    assert resumed.output_token_ids == list(before)
    for token in after:
        processor.process([news(resumed, [token])])
    rest = request.take()
    assert said is not None and rest is not None
    assert said.outputs[0].text + rest.outputs[0].text == full.text
    assert rest.outputs[0].num_tokens == full.num_tokens


@pytest.mark.parametrize(
    ("resume", "params", "reason"),
    [
        (b"ab", {"max_tokens": 2}, "length"),
        (b"ab", {"stop": ("b",)}, "stop"),
        (b"ab", {"stop_token_ids": (98,)}, "stop"),
    ],
)
def test_a_resume_of_what_was_complete_needs_no_core(resume, params, reason):
    request, sequences = add(make_processor(), resume=resume, **params)
    piece = request.take()
    assert sequences == [] and piece is not None and piece.finished
    assert piece.outputs[0].finish_reason == reason


def test_absorbing_piece_by_piece_equals_taking_all_at_once():
    rng = random.Random(7)
    processor = make_processor()
    eager, eager_sequences = add(processor, n=2, logprobs=0)
    lazy, lazy_sequences = add(processor, n=2, logprobs=0)
    whole = None
    for step in range(30):
        for index in (0, 1):
            if rng.random() < 0.6:
                token = rng.choice(b"abc \xc3\xbc")
                finish = "length" if step >= 28 else None
                for sequence in (eager_sequences[index], lazy_sequences[index]):
                    entry = TokenLogprobs(token, -1.0, 1, [], [])
                    processor.process([news(sequence, [token], finish, logprobs=[entry])])
        piece = eager.take()
        if piece is not None:
            if whole is None:
                whole = piece
            else:
                whole.absorb(piece)
    assert whole == lazy.take()


def test_each_answer_of_a_resumed_request_goes_on_where_it_was():
    processor = make_processor()
    reported = [ResumedOutput(list(b"ab"), ended=True), ResumedOutput(list(b"x")), ResumedOutput()]
    request, sequences = add(processor, resumed=reported, n=3, max_tokens=3)
    assert [s.output_token_ids for s in sequences] == [list(b"x"), []]
    assert [s.seed for s in sequences] == [key(5, 1), key(5, 2)]
    assert request.take() is None  # nothing to say yet
    third = news(sequences[1], b"c", num_cached_tokens=16, queued_s=0.5)
    processor.process([news(sequences[0], b"yz", "length", num_cached_tokens=8), third])
    piece = request.take()
    assert piece is not None and not piece.finished
    assert [(o.index, o.text, o.num_tokens, o.resumed_texts) for o in piece.outputs] == [
        (1, "yz", 3, ["x"]), (2, "c", 1, []),
    ]  # fmt: skip
    # Who has not begun yet speaks of the prompt.
    assert (piece.num_cached_tokens, piece.queued_s) == (16, 0.5)


def test_a_resume_in_which_all_had_ended_is_finished_at_once():
    reported = [ResumedOutput(list(b"ab"), ended=True), ResumedOutput([], ended=True)]
    request, sequences = add(make_processor(), resumed=reported, n=2)
    piece = request.take()
    assert sequences == [] and piece is not None
    assert (piece.finished, piece.outputs) == (True, [])
