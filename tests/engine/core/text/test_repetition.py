"""An answer that repeats itself ends where the repetition is complete, streamed or resumed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.core.text.output_processor import OutputProcessor, SettledSubmission
from octavo_engine.core.text.repetition import RepetitionWatch
from octavo_engine.core.text.resumed import ResumedOutput
from octavo_engine.errors import InvalidRequest
from octavo_engine.state.outputs import SequenceOutput
from octavo_engine.state.sampling_params import RepetitionDetection, SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer

THRICE = RepetitionDetection(max_pattern_size=4, min_pattern_size=2, min_count=3)


def first_repetition(tokens: list[int], wanted: RepetitionDetection) -> int | None:
    """By definition: the shortest beginning that ends with some pattern so many times."""
    for end in range(1, len(tokens) + 1):
        for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
            pattern = tokens[max(0, end - size) : end]
            times = wanted.min_count
            if len(pattern) == size and tokens[max(0, end - size * times) : end] == pattern * times:
                return end
    return None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    smallest=st.integers(0, 3),
    more=st.integers(0, 4),
    count=st.integers(2, 4),
)
def test_it_is_found_where_it_is_by_definition(tokens, smallest, more, count):
    wanted = RepetitionDetection(
        max_pattern_size=smallest + more, min_pattern_size=smallest, min_count=count
    )
    assert RepetitionWatch(wanted).cut(tokens) == first_repetition(tokens, wanted)


def submit(reported: bytes = b"", **params):
    processor = OutputProcessor(ByteTokenizer())
    submission = SettledSubmission(
        request_id="r", prompt=None, prompt_token_ids=[1], seed=0, eos_token_ids=(257,),
        params=SamplingParams(max_tokens=100, repetition_detection=THRICE, **params),
        resumed=[ResumedOutput(list(reported))] if reported else (),
    )  # fmt: skip
    request, sequences = processor.add(submission)
    return processor, request, sequences


@pytest.mark.parametrize("portions", [1, 2, 5, 100])
def test_an_answer_ends_there_and_its_sequence_is_stopped(portions):
    processor, request, (sequence,) = submit()
    text = b"Well: abcabcabcabcabc"
    assert sequence.params.repetition_detection is None  # the core need not know
    aborts: list[str] = []
    for at in range(0, len(text), portions):
        output = SequenceOutput(
            request_id=sequence.request_id, token_ids=list(text[at : at + portions])
        )
        aborts += processor.process([output]).aborts

    (answer,) = request.take().outputs
    assert (answer.text, answer.finish_reason) == ("Well: abcabcabc", "repetition")
    assert (answer.num_tokens, answer.stop_reason) == (15, None)
    assert aborts == [sequence.request_id]


def test_what_was_told_counts():
    processor, request, (sequence,) = submit(reported=b"abcabca")
    processor.process([SequenceOutput(request_id=sequence.request_id, token_ids=list(b"bcabc"))])
    assert [(o.text, o.finish_reason) for o in request.take().outputs] == [("bc", "repetition")]

    _, request, sequences = submit(reported=b"abcabcabc")
    assert sequences == []
    assert [(o.text, o.finish_reason) for o in request.take().outputs] == [("", "repetition")]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": -1},
        {"max_pattern_size": 10**6},
        {"max_pattern_size": 2, "min_pattern_size": 3},
        {"max_pattern_size": 2, "min_count": 1},
    ],
)
def test_what_cannot_be_watched_is_refused(fields):
    fields = {"min_pattern_size": 0, **fields}
    with pytest.raises(InvalidRequest) as refused:
        RepetitionDetection(**fields)
    assert (refused.value.param or "").startswith("repetition_detection.")
