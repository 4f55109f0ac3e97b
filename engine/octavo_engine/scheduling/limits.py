"""How long a sequence may get, and when it is at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import ContextLengthExceeded, InvalidRequest
from octavo_engine.kv.retention import RetentionLimits
from octavo_engine.state.outputs import SequenceOutput

if TYPE_CHECKING:
    from octavo_engine.config import SchedulerConfig
    from octavo_engine.state.outputs import FinishReason
    from octavo_engine.state.request import EngineRequest
    from octavo_engine.state.sequence import Sequence


def retention_limits(config: SchedulerConfig, num_blocks: int) -> RetentionLimits:
    """What the settings allow requests to retain of so many blocks."""
    in_all = int(config.max_retained_kv * num_blocks)
    per_owner = min(in_all, int(config.max_retained_kv_per_tenant * num_blocks))
    return RetentionLimits(in_all, per_owner, config.max_retention_s)


def max_num_tokens(request: EngineRequest, config: SchedulerConfig, *, kv_tokens: int) -> int:
    """The most tokens the sequence may have, prompt included. An error if that cannot work: a
    request that memory cannot hold even alone would wait forever, and everyone behind it."""
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
    if num_prompt >= config.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens, but the context holds {config.max_model_len} and "
            "at least one must be left for the answer; shorten the prompt",
            param="prompt",
        )
    if request.params.prompt_logprobs is not None and any(s.is_two_way for s in request.media):
        raise InvalidRequest(  # logits of so many rows in one step are more than there is room for
            "prompt_logprobs is not supported with pictures of this model; leave one of them out",
            param="prompt_logprobs",
        )
    max_tokens = request.params.max_tokens
    wanted = min(num_prompt + (1 if max_tokens is None else max_tokens), config.max_model_len)
    capacity = kv_tokens + 1  # the last token of a sequence is never computed
    if wanted > capacity:
        raise InvalidRequest(
            f"the request needs KV memory for {wanted - 1} tokens, but there is memory for "
            f"{kv_tokens} in all; shorten the prompt or lower max_tokens",
            param="prompt" if num_prompt > kv_tokens else "max_tokens",
        )
    return wanted if max_tokens is not None else min(config.max_model_len, capacity)


def end_of(sequence: Sequence) -> FinishReason | None:
    """Why the sequence ends with its last token; None if it goes on."""
    num_tokens = len(sequence.token_ids)
    if sequence.grammar is not None and sequence.grammar.is_complete:
        return "stop"  # nothing can follow, whatever min_tokens says
    if sequence.token_ids[-1] in sequence.stop_ids and num_tokens >= sequence.min_num_tokens:
        return "stop"
    return "length" if num_tokens >= sequence.max_num_tokens else None


def stop_token_id(sequence: Sequence) -> int | None:
    """The caller's stop id that ended it; None for the model's own end of text."""
    if sequence.finish_reason != "stop" or is_whole(sequence):
        return None
    request, last = sequence.request, sequence.token_ids[-1]
    is_end_of_text = last in request.eos_token_ids and not request.params.ignore_eos
    return None if is_end_of_text else last


def is_whole(sequence: Sequence) -> bool:
    """It ended because its grammar was complete, not by a token that says so."""
    return sequence.grammar is not None and sequence.grammar.is_complete


def last_output(sequence: Sequence) -> SequenceOutput:
    """What there is to say of a sequence that ended without a further token."""
    return SequenceOutput(
        request_id=sequence.request_id,
        finish_reason=sequence.finish_reason,
        stop_token_id=stop_token_id(sequence),
        is_whole=is_whole(sequence),
    )


def without_token(sequence: Sequence, *, is_refused: bool) -> SequenceOutput:
    """The end of one for which no token could be chosen."""
    reason = (
        "what the request allows (its grammar, allowed_token_ids, bad_words, logit_bias, "
        "min_tokens) leaves none; relax one of them"
        if is_refused
        else "the model's logits are not finite"
    )
    return SequenceOutput(
        request_id=sequence.request_id,
        finish_reason="error",
        error=f"no token can be chosen at position {sequence.num_tokens}: {reason}",
        is_refused=is_refused,
    )
