"""From a request to SamplingParams: defaults of the model, limits of the server. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.server.limits import RequestLimits
    from octavo_engine.server.openai.schemas import SamplingFields

# Fields that SamplingParams has under the same name and takes as they are.
SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "prompt_logprobs", "repetition_detection", "stream_interval",
)  # fmt: skip
LISTS = (
    "stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors", "logprob_token_ids",
)  # fmt: skip
# Of a model's generation_config, what may serve as a default.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_LOGIT_BIAS = 100.0
_SHOWN_KEYS = 10


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: Mapping[str, float],
    limits: RequestLimits,
) -> SamplingParams:
    """Of a request that has passed `check_sizes`. Raises InvalidRequest that names the field.
    `max_tokens` None fills the context."""
    if logprobs is not None:
        check_logprobs("logprobs", logprobs, limits.max_logprobs)
    if request.logprob_token_ids:
        if logprobs is None:
            raise InvalidRequest(
                "logprob_token_ids needs logprobs to be set too", param="logprob_token_ids"
            )
        logprobs = None  # these come in place of the likeliest, however many those were to be
    fields: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
    for name in MODEL_DEFAULTS:
        if name in defaults:
            value = defaults[name]
            fields[name] = int(value) if name == "top_k" else value
    for name in SAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    for name in LISTS:
        value = getattr(request, name)
        if value is not None:
            fields[name] = tuple(value)
    if request.stop is not None:
        fields["stop"] = _stop(request.stop)
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias)
    return SamplingParams(**fields)


def check_sizes(request: SamplingFields, limits: RequestLimits) -> None:
    """The lengths of lists, before anything is done with them."""
    if request.n is not None:
        _at_most("n", request.n, limits.max_n)
    stop = _stop(request.stop) if request.stop is not None else ()
    _at_most("stop", len(stop), limits.max_stop, "strings")
    for text in stop:
        _at_most("stop", len(text), limits.max_stop_chars, "characters in one string")
    _at_most("logit_bias", len(request.logit_bias or ()), limits.max_logit_bias, "entries")
    for name in LISTS:
        _at_most(name, len(getattr(request, name) or ()), limits.max_token_list, "entries")
    _at_most("bad_words", len(request.bad_words or ()), limits.max_bad_words, "words")
    for word in request.bad_words or ():
        _at_most("bad_words", len(word), limits.max_bad_word_chars, "characters in one word")
    if request.prompt_logprobs is not None:
        check_logprobs("prompt_logprobs", request.prompt_logprobs, limits.max_logprobs)
        if request.stream:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs"
            )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only allowed with stream: true", param="stream_options"
        )
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= 128:
        raise InvalidRequest("cache_salt must have 1 to 128 characters", param="cache_salt")
    if request.priority is not None and not -(2**31) <= request.priority < 2**31:
        raise InvalidRequest("priority must fit 32 bits", param="priority")


def check_logprobs(name: str, value: int, limit: int) -> None:
    """-1 is the whole vocabulary, as a value and as the limit. Raises InvalidRequest."""
    if limit == -1:
        return
    if value == -1:
        raise InvalidRequest(
            f"{name} -1, the whole vocabulary, needs a server with --max-logprobs -1; here at "
            f"most {limit} are given",
            param=name,
        )
    _at_most(name, value, limit)


def _stop(stop: str | list[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    bad = [key for key in bias if not key.isascii() or not key.isdigit() or len(key) > 10]
    if bad:
        shown = ", ".join(repr(key[:20]) for key in bad[:_SHOWN_KEYS])
        more = f" and {len(bad) - _SHOWN_KEYS} more" if len(bad) > _SHOWN_KEYS else ""
        raise InvalidRequest(
            f"logit_bias: keys are token ids; got {shown}{more}", param="logit_bias"
        )
    return {
        int(key): max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, value)) for key, value in bias.items()
    }


def _at_most(name: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        tail = f" {unit}" if unit else ""
        raise InvalidRequest(f"{name} must be at most {limit}{tail}; got {value}", param=name)
