"""Whether the model at hand can serve a request, and the parameters settled for it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from octavo_engine.errors import ContextLengthExceeded, InvalidRequest
from octavo_engine.tokenization.threads import off_loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.state.sampling_params import SamplingParams


MAX_CHOICES = 1 << 23  # prompt log-probabilities of one request; the answer is built in memory


class Encoder(Protocol):
    """The one method of a tokenizer that is needed here."""

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]: ...


def settle_params(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    info: ModelInfo,
    tokenizer: Encoder,
    resumed: Sequence[ResumedOutput] = (),
) -> SamplingParams:
    """The parameters with `max_tokens` and a number of logprobs filled in, bad words as token ids.

    Raises ContextLengthExceeded or InvalidRequest that names the field. A prompt must leave room
    for one token. An explicit `max_tokens` beyond the room is refused rather than cut: who
    requested so many should learn that they cannot come.
    """
    check_prompt(prompt_token_ids, info)
    _check_ids("stop_token_ids", params.stop_token_ids, info)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), info)
    _check_ids("logprob_token_ids", params.logprob_token_ids, info)
    _check_ids("logit_bias", params.logit_bias or (), info)
    for word in params.bad_words_token_ids:
        _check_ids("bad_words_token_ids", word, info)
    if params.stop and not params.detokenize:
        raise InvalidRequest("stop strings need detokenize to be true", param="stop")
    max_tokens = _max_tokens(len(prompt_token_ids), params, info)
    _check_resumed(resumed, params.n, max_tokens, info)
    changes: dict[str, object] = {}
    if max_tokens != params.max_tokens:
        changes["max_tokens"] = max_tokens
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if name == "logprobs" and params.logprob_token_ids:
            continue  # as many as are named
        if wanted is not None and (wanted == -1 or wanted > info.vocab_size):
            changes[name] = info.vocab_size
    params = with_bad_words(params, tokenizer)
    return msgspec.structs.replace(params, **changes) if changes else params


async def tokenized_bad_words(params: SamplingParams, tokenizer: Encoder) -> SamplingParams:
    """As `with_bad_words`, off the event loop where there are many."""
    num_chars = 2 * sum(map(len, params.bad_words))
    return await off_loop(lambda: with_bad_words(params, tokenizer), num_chars)


def with_bad_words(params: SamplingParams, tokenizer: Encoder) -> SamplingParams:
    """Bad words as token ids: each as it is tokenised at the start of a text and after a space."""
    if not params.bad_words:
        return params
    words = [word.lstrip() for word in params.bad_words]
    if not all(words):
        raise InvalidRequest("bad_words must not be empty", param="bad_words")
    texts = [text for word in words for text in (word, " " + word)]
    try:
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
    except InvalidRequest as error:
        error.param = "bad_words"
        raise
    ids = dict.fromkeys(tuple(each) for each in found if each)
    return msgspec.structs.replace(
        params, bad_words=(), bad_words_token_ids=(*params.bad_words_token_ids, *ids)
    )


def check_choices(num_tokens: int, params: SamplingParams) -> None:
    """Whether the log-probabilities of a prompt of so many tokens can be sent. `params` are
    settled."""
    wanted = params.prompt_logprobs
    if wanted is not None and num_tokens * (wanted + 1) > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt_logprobs asks for {wanted} alternatives of {num_tokens} tokens, together more "
            f"than {MAX_CHOICES}; ask for fewer, or for a shorter prompt",
            param="prompt_logprobs",
        )


def check_prompt(prompt_token_ids: Sequence[int], info: ModelInfo) -> None:
    if len(prompt_token_ids) == 0:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
    check_length_of_prompt(len(prompt_token_ids), info)
    _check_ids("prompt", prompt_token_ids, info)


def check_length_of_prompt(length: int, info: ModelInfo) -> None:
    """Raises ContextLengthExceeded."""
    if length >= info.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens, but the model's context holds {info.max_model_len}, "
            "the answer included",
            param="prompt",
        )


def _max_tokens(prompt_length: int, params: SamplingParams, info: ModelInfo) -> int:
    room = info.max_model_len - prompt_length
    if params.max_tokens is None:
        if params.min_tokens > room:
            raise ContextLengthExceeded(
                f"min_tokens is {params.min_tokens}, but the prompt of {prompt_length} tokens "
                f"leaves room for {room} in the context of {info.max_model_len}",
                param="min_tokens",
            )
        return room
    if params.max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_length} tokens and max_tokens is {params.max_tokens}, "
            f"together {prompt_length + params.max_tokens}, but the model's context holds "
            f"{info.max_model_len}",
            param="max_tokens",
        )
    return params.max_tokens


def _check_resumed(
    resumed: Sequence[ResumedOutput], n: int, max_tokens: int, info: ModelInfo
) -> None:
    if resumed and len(resumed) != n:
        raise InvalidRequest(f"tokens has {len(resumed)} answers, but n is {n}", param="tokens")
    for index, answer in enumerate(resumed):
        _check_ids("tokens", answer.token_ids, info)
        if len(answer.token_ids) > max_tokens:
            raise InvalidRequest(
                f"answer {index} has {len(answer.token_ids)} tokens already, but max_tokens is "
                f"{max_tokens}",
                param="tokens",
            )


def _check_ids(param: str, ids: Iterable[int], info: ModelInfo) -> None:
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= info.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(
            f"{param}: token id {bad} is not in the vocabulary of {info.vocab_size}", param=param
        )
