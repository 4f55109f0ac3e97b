"""Beam search in Python: what `LLM` offers beside sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo_engine.core.beam_search import Beam, BeamSearch, BeamSearchParams, Choice
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.tokenizer import ends_of_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One text."""

    tokens: list[int]  # without the prompt
    text: str
    cum_logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The texts that were found for a prompt, the best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    prompts: Sequence[tuple[str | None, list[int]]],
    params: BeamSearchParams,
    *,
    info: ModelInfo,
    tokenizer: Tokenizer,
    generate: Callable[[list[Any], SamplingParams], list[RequestOutput]],
) -> list[BeamSearchOutput]:
    """All prompts side by side. A beam's beginning is found in the prefix cache at every step."""
    ends = frozenset(ends_of_text(tokenizer, info.eos_token_ids))
    searches = [BeamSearch(params, ends) for _ in prompts]
    one = one_token(params)
    for number in range(params.max_tokens):
        pending = [
            (search, [*ids, *beam.token_ids])
            for search, (_, ids) in zip(searches, prompts, strict=True)
            if number + len(ids) < info.max_model_len
            for beam in search.live
        ]
        if not pending:
            break
        answers = generate([tokens for _, tokens in pending], one)
        choices: dict[int, list[list[Choice]]] = {}
        for (search, _), answer in zip(pending, answers, strict=True):
            choices.setdefault(id(search), []).append(choices_of(answer))
        for search in searches:
            if id(search) in choices:
                search.advance(choices[id(search)])
    results = []
    for search, (text, ids) in zip(searches, prompts, strict=True):
        search.cut()
        found = [_sequence(beam, tokenizer) for beam in search.best()]
        results.append(BeamSearchOutput(text, ids, found))
    return results


def one_token(params: BeamSearchParams) -> SamplingParams:
    """What a beam asks of the engine at every step."""
    return SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, detokenize=False,
        ignore_eos=True,
    )  # fmt: skip


def choices_of(answer: RequestOutput) -> list[Choice]:
    logprobs = answer.outputs[0].logprobs
    if not logprobs:
        return []  # it failed: the beam ends here
    return [Choice(top.token_id, top.logprob) for top in logprobs[0].top]


def _sequence(beam: Beam, tokenizer: Tokenizer) -> BeamSearchSequence:
    return BeamSearchSequence(
        list(beam.token_ids),
        tokenizer.decode(list(beam.token_ids)),
        beam.cum_logprob,
        beam.finish_reason or "length",
    )
