"""Beam search against every text there is, and on a real model against its own scores."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo_engine.core.beam_search import BeamSearch, BeamSearchParams, Choice
from octavo_engine.core.offline.llm import LLM
from octavo_engine.core.offline.structured_output import structured_output
from octavo_engine.errors import InvalidRequest, OctavoError
from octavo_engine.state.sampling_params import SamplingParams

END = 2


def chain(seed: int) -> dict[tuple[int, ...], list[Choice]]:
    """Log-probabilities of the tokens 0, 1 and END after every text of up to three tokens."""
    rng = random.Random(seed)
    texts = [t for n in range(4) for t in itertools.product((0, 1), repeat=n)]
    return {t: [Choice(token, -rng.random() * 3) for token in (0, 1, END)] for t in texts}


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(8))
def test_with_room_for_all_texts_the_best_of_all_are_found(seed: int, penalty: float):
    nexts = chain(seed)
    params = BeamSearchParams(beam_width=8, max_tokens=3, length_penalty=penalty)
    search = BeamSearch(params, {END})
    for _ in range(3):
        search.advance([nexts[beam.token_ids] for beam in search.live])
    search.cut()

    every: list[tuple[float, tuple[int, ...]]] = []
    for text in (t for n in (1, 2, 3) for t in itertools.product((0, 1, END), repeat=n)):
        if END in text[:-1] or (len(text) < 3 and text[-1] != END):
            continue
        logprob = sum(nexts[text[:i]][token].logprob for i, token in enumerate(text))
        every.append((logprob / len(text) ** penalty, text))
    best = sorted(every, reverse=True)[:8]
    got = [(search.score(b), (*b.token_ids, *([END] if b.finish_reason == "stop" else [])))
           for b in search.best()]  # fmt: skip
    assert [text for _, text in got] == [text for _, text in best]
    assert [score for score, _ in got] == pytest.approx([score for score, _ in best])


def test_the_end_is_a_token_like_others_where_it_is_ignored_and_kept_where_asked():
    nexts = [Choice(END, -0.1), Choice(0, -1.0)]
    ignoring = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=1, ignore_eos=True), {END})
    keeping = BeamSearch(
        BeamSearchParams(beam_width=1, max_tokens=1, include_stop_str_in_output=True), {END}
    )
    for search in (ignoring, keeping):
        search.advance([nexts])
        search.cut()
    assert [(b.token_ids, b.finish_reason) for b in ignoring.best()] == [((END,), "length")]
    assert [(b.token_ids, b.finish_reason) for b in keeping.best()] == [((END,), "stop")]


@pytest.mark.parametrize(
    ("width", "tokens", "param"),
    [(0, 1, "beam_width"), (11, 1, "beam_width"), (1, 0, "max_tokens")],
)
def test_odd_sizes_are_refused(width: int, tokens: int, param: str):
    with pytest.raises(InvalidRequest) as refused:
        BeamSearchParams(beam_width=width, max_tokens=tokens)
    assert refused.value.param == param


@pytest.mark.slow
def test_a_real_model_s_beams_are_worth_what_the_model_says():
    prompt = "The capital of France is"
    with LLM("demo://smollm2", kv_cache_memory_bytes=1 << 26, max_model_len=128) as llm:
        one, wide = (
            llm.beam_search([prompt], BeamSearchParams(beam_width=width, max_tokens=6))[0]
            for width in (1, 4)
        )
        greedy = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6))[0]
        assert one.sequences[0].tokens == greedy.outputs[0].token_ids
        assert one.sequences[0].text == greedy.outputs[0].text
        assert len(wide.sequences) == 4
        assert wide.sequences[0].cum_logprob >= one.sequences[0].cum_logprob
        assert len({tuple(s.tokens) for s in wide.sequences}) == 4
        for found in wide.sequences:
            if found.finish_reason != "length":
                continue
            ids = [*wide.prompt_token_ids, *found.tokens]
            scored = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
            assert scored.prompt_logprobs is not None
            own = [entry.logprob for entry in scored.prompt_logprobs[-6:] if entry is not None]
            assert sum(own) == pytest.approx(found.cum_logprob, abs=0.02)
    with pytest.raises(OctavoError, match="closed"):
        llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=1))


# ── what an answer must be ──


def test_exactly_one_shape_is_given():
    assert structured_output(regex="a+").text == "a+"
    assert structured_output(json_object=True).kind != structured_output(choice=["a"]).kind
    for wrong in ({}, {"regex": "a", "choice": ["b"]}):
        with pytest.raises(InvalidRequest, match="exactly one"):
            structured_output(**wrong)  # type: ignore[arg-type]  # some of them
    with pytest.raises(InvalidRequest):
        structured_output(regex="(")
