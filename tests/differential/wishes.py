"""Requests that wish for anything there is to wish for, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.core.offline.structured_output import structured_output
from octavo_engine.state.sampling_params import RepetitionDetection, SamplingParams

if TYPE_CHECKING:
    from random import Random

WORDS = (
    "the", "a", "of", "city", "France", "Oslo", "sky", "is", "blue", "one", "two", "three", "json",
    "def", "foo(x):", "return", "x", "+", "1", '{"a":', "1}", "ünïcödé", "日本", "🙂", "👩‍🚀",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "n": {"type": "integer"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"choice": ["yes", "no", "maybe so", "日本 🙂"]},
    {"regex": r"[a-zé]{2,8}( [a-z🙂]{1,5})?"},
    {"json": SCHEMA},
    {"json_object": True},
    {"grammar": 'root ::= "((" root "))" | "x" | "ü" root'},
    {"structural_tag": {"format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "<a>"}, {"type": "regex", "pattern": "[0-9]{1,9}"}]}}},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wish:
    """One request, and what becomes of it."""

    prompt: str
    params: SamplingParams
    priority: int = 0
    abort_after: int | None = None  # tokens of its first answer
    deadline_s: float | None = None


class Wisher:
    """Draws requests whose prompts share their beginnings and whose stop strings are met."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._bases = [self._text(rng.randint(3, 70)) for _ in range(6)]
        self._heard = ["the", "e ", "\n", "."]

    def hear(self, text: str) -> None:
        """What was said will be said again: parts of it make good stop strings."""
        if text:
            self._heard = [*self._heard[-60:], text]

    def wish(self) -> Wish:
        rng = self._rng
        prompt = rng.choice(self._bases)
        if rng.random() < 0.7:
            prompt += " " + self._text(rng.randint(1, 12))
        if rng.random() < 0.3:
            prompt += " " + prompt[-80:]  # what is said again can be guessed
        params = self._params()
        return Wish(
            prompt,
            params,
            priority=rng.choice([0, 0, -1, 3]),
            abort_after=rng.randint(0, 20) if rng.random() < 0.1 else None,
            deadline_s=rng.choice([0.001, 0.05]) if rng.random() < 0.05 else None,
        )

    def stop(self) -> str:
        text = self._rng.choice(self._heard)
        begin = self._rng.randrange(len(text))
        return text[begin : begin + self._rng.randint(1, 5)]

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(num_words))

    def _params(self) -> SamplingParams:
        rng = self._rng
        max_tokens = rng.choice([1, 2, 5, 17, 33, 60])
        some: dict[str, tuple[float, Any]] = {
            "top_p": (0.3, rng.choice([0.1, 0.5, 0.9])),
            "top_k": (0.3, rng.choice([1, 5, 50])),
            "min_p": (0.2, 0.1),
            "presence_penalty": (0.2, rng.choice([-1.0, 0.5, 2.0])),
            "frequency_penalty": (0.2, rng.choice([-0.5, 0.7])),
            "repetition_penalty": (0.2, rng.choice([0.9, 1.3])),
            "stop": (0.3, tuple(self.stop() for _ in range(rng.randint(1, 3)))),
            "include_stop_str_in_output": (0.15, True),
            "stop_token_ids": (0.2, (rng.randint(0, 255), 28, 30)),
            "ignore_eos": (0.3, True),
            "min_tokens": (0.2, rng.randint(0, max_tokens)),
            "logprobs": (0.3, rng.choice([0, 1, 5, -1])),
            "prompt_logprobs": (0.15, rng.choice([0, 2])),
            "logit_bias": (0.15, {rng.randint(0, 255): rng.choice([-100.0, 5.0, -2.0])}),
            "bad_words": (0.1, ("the", "city")),
            "allowed_token_ids": (0.07, tuple(rng.sample(range(256), 20))),
            "n": (0.2, rng.choice([2, 3])),
            "skip_special_tokens": (0.15, False),
            "skip_reading_prefix_cache": (0.05, True),
            "detokenize": (0.03, False),
            "repetition_detection": (
                0.1,
                RepetitionDetection(max_pattern_size=rng.choice([1, 4]), min_count=2),
            ),
            "grammar": (0.2, rng.choice(GRAMMARS)),
        }
        fields = {name: value for name, (odds, value) in some.items() if rng.random() < odds}
        if "grammar" in fields:
            fields["grammar"] = structured_output(**fields["grammar"])
        if fields.get("detokenize") is False:
            fields.pop("stop", None)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
            seed=rng.randint(-5, 1000),
            **fields,
        )
