"""use_beam_search over HTTP: the n likeliest answers to a prompt, as one output."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo_engine.core.beam_search import MAX_BEAM_WIDTH, Beam, BeamSearch, BeamSearchParams
from octavo_engine.core.offline.beam_search import choices_of, one_token
from octavo_engine.core.text.output_stream import OutputSink
from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
from octavo_engine.core.text.submission import Submission
from octavo_engine.errors import DeadlineExceeded, InvalidRequest, QueueFull
from octavo_engine.server.generation.gather import all_of
from octavo_engine.server.http.errors import not_supported
from octavo_engine.tokenization.tokenizer import ends_of_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.server.generation.job import Job
    from octavo_engine.server.openai.schemas import SamplingFields
    from octavo_engine.server.service import Service
    from octavo_engine.state.sampling_params import SamplingParams

MAX_LENGTH_PENALTY = 10  # a length to its power is a number still

# What would change which texts are likely, or would have to be reported for each. Temperature and
# the like change nothing there.
_EXCLUDED = (
    "stream", "stop", "stop_token_ids", "min_tokens", "logprobs", "logprob_token_ids",
    "prompt_logprobs", "logit_bias", "bad_words", "allowed_token_ids", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "repetition_detection", "logits_processors",
)  # fmt: skip


def read_beams(
    request: SamplingFields, params: SamplingParams, room: int
) -> BeamSearchParams | None:
    """What the request asks for, if it does; `room` is how long an answer can be. Raises
    RequestError for what does not go together."""
    if not request.use_beam_search:
        return None
    neutral = {"repetition_penalty": 1.0}
    for field in _EXCLUDED:
        value = getattr(request, field, None)
        if value and value != neutral.get(field):
            raise not_supported(field, "not together with use_beam_search", param=field)
    if params.grammar is not None:
        raise not_supported(
            "use_beam_search",
            "not together with structured outputs, enforced tools or a thinking budget",
        )
    if params.n > MAX_BEAM_WIDTH:
        raise InvalidRequest(
            f"n must be at most {MAX_BEAM_WIDTH} with use_beam_search; got {params.n}", param="n"
        )
    penalty = request.length_penalty
    if penalty is not None and not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
        raise InvalidRequest(
            f"length_penalty must be between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}; "
            f"got {penalty:g}",
            param="length_penalty",
        )
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=max(1, min(params.max_tokens or room, room)),
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if penalty is None else penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )


async def beam_search(
    service: Service, job: Job, params: BeamSearchParams, prompt_index: int, request_id: str,
    is_stopped: Callable[[], bool],
) -> RequestOutput:  # fmt: skip
    """All that is found for one prompt. Each beam finds its beginning in the prefix cache.

    Cancelling it aborts what runs; where it is stopped it ends with what it has.
    """
    engine, prompt = service.engine, job.prompts[prompt_index]
    ends = ends_of_text(engine.tokenizer, engine.info.eos_token_ids)
    search = BeamSearch(params, frozenset(ends))
    ends_at = None if job.deadline_s is None else time.monotonic() + job.deadline_s
    late = DeadlineExceeded(f"The request was not done within {job.deadline_s or 0:g} s.")
    result = RequestOutput(request_id, None, prompt, finished=True)

    async def step(beam: Beam) -> RequestOutput:
        left_s = None if ends_at is None else ends_at - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise late
        outputs: list[RequestOutput] = []

        async def put(output: RequestOutput) -> None:
            outputs.append(output)

        submission = Submission(
            request_id=request_id,
            prompt=[*prompt, *beam.token_ids],
            params=one_token(params),
            priority=job.priority,
            deadline_s=left_s,
            cache_salt=job.cache_salt,
            adapter=job.adapter,
            stream=False,
            group=job.group,
        )
        try:
            await engine.deliver(submission, OutputSink(put))
        except QueueFull:
            if beam.token_ids and left_s is not None:
                raise late from None  # it was admitted; its next token would miss the deadline
            raise
        return outputs[0]

    for number in range(params.max_tokens):
        if not search.live or is_stopped():
            break
        answers = await all_of([step(beam) for beam in search.live])
        if number == 0:
            result.num_cached_tokens = answers[0].num_cached_tokens
            result.queued_s = answers[0].queued_s
        if is_stopped():  # some have no choices, for they were ended
            break
        search.advance([choices_of(answer) for answer in answers])
    search.cut()
    for index, beam in enumerate(search.best()):
        result.outputs.append(_output(service, job, index, beam, is_stopped=is_stopped()))
    return result


def _output(
    service: Service, job: Job, index: int, beam: Beam, *, is_stopped: bool
) -> CompletionOutput:
    ids = list(beam.token_ids)
    reason = beam.finish_reason or "length"
    return CompletionOutput(
        index,
        service.engine.tokenizer.decode(ids, skip_special_tokens=job.params.skip_special_tokens),
        ids,
        finish_reason="abort" if is_stopped and reason == "length" else reason,
        num_tokens=len(ids),
    )
