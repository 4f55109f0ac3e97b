"""What a model can serve: each refusal names its field and its numbers."""

import pytest

from octavo_engine.core.info import ModelInfo
from octavo_engine.core.text.resumed import ResumedOutput
from octavo_engine.core.validate import MAX_CHOICES, check_choices, settle_params
from octavo_engine.errors import ContextLengthExceeded, InvalidRequest
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer

INFO = ModelInfo(
    names=("m",),
    max_model_len=20,
    vocab_size=300,
    eos_token_ids=(257,),
    num_blocks=4,
    kv_bytes=0,
    backend="fake",
    default_params={},
    load_seconds=0.0,
    cache_key=b"",
)


def settle(prompt=(1, 2, 3), reported=(), **params):
    return settle_params(list(prompt), SamplingParams(**params), INFO, ByteTokenizer(), reported)


def refused(kind, prompt=(1, 2, 3), reported=(), **params):
    with pytest.raises(kind) as caught:
        settle(prompt, reported, **params)
    return caught.value.param, str(caught.value)


def test_an_empty_prompt_is_refused():
    assert refused(InvalidRequest, prompt=())[0] == "prompt"


@pytest.mark.parametrize(
    ("length", "max_tokens", "settled"),
    [(1, None, 19), (1, 19, 19), (19, None, 1), (19, 1, 1), (10, 10, 10), (10, 3, 3)],
)
def test_what_fits_is_served_and_no_max_tokens_means_all_the_room(length, max_tokens, settled):
    assert settle([1] * length, max_tokens=max_tokens).max_tokens == settled


@pytest.mark.parametrize("length", [20, 21, 1000])
def test_a_prompt_without_room_for_one_token_is_refused_with_both_numbers(length):
    param, message = refused(ContextLengthExceeded, prompt=[1] * length, max_tokens=None)
    assert param == "prompt"
    assert f"{length} tokens" in message and "holds 20" in message


def test_max_tokens_beyond_the_room_are_refused_with_the_numbers():
    param, message = refused(ContextLengthExceeded, prompt=[1] * 15, max_tokens=6)
    assert param == "max_tokens"
    assert "15 tokens" in message and "together 21" in message and "holds 20" in message


def test_min_tokens_beyond_the_room_are_refused():
    assert refused(ContextLengthExceeded, min_tokens=18, max_tokens=None)[0] == "min_tokens"


@pytest.mark.parametrize("bad", [-1, 300, 2**31])
def test_ids_outside_the_vocabulary_are_refused_wherever_they_stand(bad):
    for field, value in (
        ("stop_token_ids", (bad,)),
        ("allowed_token_ids", (1, bad)),
        ("logit_bias", {bad: 1.0}),
        ("bad_words_token_ids", ((1, bad),)),
    ):
        param, message = refused(InvalidRequest, **{field: value})
        assert (param, f"token id {bad} " in message) == (field, True)
    assert refused(InvalidRequest, prompt=[0, bad])[0] == "prompt"
    assert refused(InvalidRequest, reported=[ResumedOutput([1, bad])])[0] == "tokens"


def test_prompt_logprobs_beyond_what_an_answer_holds_are_refused_with_the_numbers():
    check_choices(MAX_CHOICES // 301, SamplingParams(prompt_logprobs=300))
    check_choices(1 << 30, SamplingParams())
    with pytest.raises(InvalidRequest, match="300 alternatives of 27870 tokens") as caught:
        check_choices(27870, SamplingParams(prompt_logprobs=300))
    assert caught.value.param == "prompt_logprobs"


def test_bad_words_are_tokenised_with_and_without_a_space_before():
    settled = settle(bad_words=("no", " way"), bad_words_token_ids=((5,),))
    words = [(5,), *(tuple(text) for text in (b"no", b" no", b"way", b" way"))]
    assert settled.bad_words_token_ids == tuple(words)
    assert refused(InvalidRequest, bad_words=("  ",))[0] == "bad_words"


def test_stop_strings_need_text():
    assert refused(InvalidRequest, stop=("x",), detokenize=False)[0] == "stop"


def test_a_resume_tells_of_every_answer_and_of_no_more_tokens_than_were_wanted():
    assert (
        settle(reported=[ResumedOutput([1, 2]), ResumedOutput()], n=2, max_tokens=2).max_tokens == 2
    )
    assert refused(InvalidRequest, reported=[ResumedOutput([1])], n=2) == (
        "tokens", "tokens has 1 answers, but n is 2",
    )  # fmt: skip
    assert refused(InvalidRequest, reported=[ResumedOutput(), ResumedOutput([1, 2, 3])], n=2,
        max_tokens=2) == (
        "tokens", "answer 1 has 3 tokens already, but max_tokens is 2",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_all_alternatives_are_as_many_as_the_vocabulary_has(name):
    for wanted in (-1, INFO.vocab_size + 1):
        params = settle_params([1], SamplingParams(**{name: wanted}), INFO, tokenizer=None)  # type: ignore[arg-type]  # not asked
        assert getattr(params, name) == INFO.vocab_size
    assert getattr(settle_params([1], SamplingParams(**{name: 7}), INFO, None), name) == 7  # type: ignore[arg-type]  # as above
