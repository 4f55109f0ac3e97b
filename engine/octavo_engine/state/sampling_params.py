"""How one request wants its tokens chosen. A value; it crosses the process boundary as msgpack."""

from __future__ import annotations

import math
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.protocol.vllm_options import UNSUPPORTED_SAMPLING, refusal
from octavo_engine.state.grammar import GrammarSpec  # noqa: TC001  (msgspec reads it)

MAX_SEED = 2**63 - 1
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's


class RequestOutputKind(Enum):
    """What each output of a request holds, under vLLM's names and numbers."""

    CUMULATIVE = 0  # all so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # all, once: at the end


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """End an answer once it repeats a pattern of tokens so many times in a row."""

    max_pattern_size: int  # tokens; 0: off
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        _range("repetition_detection.max_pattern_size", self.max_pattern_size, 0, 256)
        _range(
            "repetition_detection.min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size
        )
        _range("repetition_detection.min_count", self.min_count, 2, 1 << 16)


if TYPE_CHECKING:
    _NamedStruct = msgspec.Struct
else:

    class _Naming(type(msgspec.Struct)):
        """Says what to do instead of a name that is no field; msgspec says that it is none."""

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except TypeError:
                known = {name: fields.pop(name) for name in cls.__struct_fields__ if name in fields}
                if args or not fields:
                    raise
                _check_names(fields, cls.__struct_fields__)
                return super().__call__(**known)

    class _NamedStruct(msgspec.Struct, metaclass=_Naming):
        pass


class SamplingParams(_NamedStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters under vLLM's names. Raises InvalidRequest that names the field."""

    n: int = 1  # answers to the same prompt
    temperature: float = 1.0  # below 1e-5 the most likely token is taken
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the context has room for
    min_tokens: int = 0  # no end of text and no stop id before this many
    logprobs: int | None = None  # alternatives per token beside the chosen one; -1: all there are
    logprob_token_ids: tuple[int, ...] = ()  # reported in place of the likeliest; sets logprobs
    prompt_logprobs: int | None = None  # as logprobs
    flat_logprobs: bool = False  # in Python: in a few long lists, see core.flat_logprobs
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # `bad_words` once tokenised
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    shown_special_ids: tuple[int, ...] = ()  # these are text even where special tokens are skipped
    detokenize: bool = True
    grammar: GrammarSpec | None = None  # the answer is a text of this language
    repetition_detection: RepetitionDetection | None = None
    skip_reading_prefix_cache: bool = False  # compute the prompt; others may still find it cached
    # Of AsyncEngine; LLM returns all at the end.
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    stream_interval: int | None = None  # tokens in one output, if above the engine's own
    logits_processors: tuple[str, ...] = ()  # names of entry points in `octavo.logits_processors`

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # one, as people write it
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        _range("n", self.n, 1, 128)
        _finite("temperature", self.temperature, 0.0, 1e4)
        _finite("top_p", self.top_p, 0.0, 1.0)
        _range("top_k", self.top_k, -1, 2**31 - 1)
        _finite("min_p", self.min_p, 0.0, 1.0)
        _finite("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _finite("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _finite("repetition_penalty", self.repetition_penalty, 0.0, 1e4)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be above 0", param="repetition_penalty")
        if self.seed is not None:
            _range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.stream_interval is not None:
            _range("stream_interval", self.stream_interval, 1, 2**31 - 1)
        self._settle_logprobs()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _range(name, value, -1, 2**31 - 1)
        if any(not isinstance(s, str) for s in self.stop):
            raise InvalidRequest("stop must be strings", param="stop")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        for token, bias in (self.logit_bias or {}).items():
            if math.isnan(bias):
                raise InvalidRequest(f"logit_bias[{token}] is not a number", param="logit_bias")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")

    def _settle_logprobs(self) -> None:
        """`logprobs` is how many tokens are reported; where they are named it follows from them."""
        count = len(self.logprob_token_ids)
        if count == 0:
            return
        if count > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(
                f"logprob_token_ids must be at most {MAX_LOGPROB_TOKEN_IDS} entries; got {count}",
                param="logprob_token_ids",
            )
        if self.logprobs not in (None, count):
            raise InvalidRequest(
                f"logprobs must be the length of logprob_token_ids, {count}, or left out; got "
                f"{self.logprobs}",
                param="logprob_token_ids",
            )
        msgspec.structs.force_setattr(self, "logprobs", count)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def needs_host(self) -> bool:
        """Something is requested that the host must do for every token, with the one before in
        hand: such a request cannot be a step ahead of its own tokens."""
        return bool(
            self.grammar is not None
            or self.logits_processors
            or any(len(word) > 1 for word in self.bad_words_token_ids)
            or self.prompt_logprobs is not None
        )


def _range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a whole number; got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}; got {value}", param=name)


def _finite(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a number; got {value!r}", param=name)
    if not low <= value <= high:  # false for NaN too
        raise InvalidRequest(
            f"{name} must be between {low:g} and {high:g}; got {value}", param=name
        )


def _check_names(others: dict[str, Any], known: tuple[str, ...]) -> None:
    """Of vLLM's parameters that are no fields: those that change nothing pass."""
    for name, value in others.items():
        if name not in UNSUPPORTED_SAMPLING:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"SamplingParams() has no field {name}; {hint}")
        advice = refusal(name, value, UNSUPPORTED_SAMPLING)
        if advice is not None:
            raise InvalidRequest(f"{name} is not supported: {advice}", param=name)
