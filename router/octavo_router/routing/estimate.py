"""How many tokens a prompt of so many bytes is likely to have, learnt from what engines report."""

from __future__ import annotations

TOKENS_PER_BYTE = 0.25  # until something was learnt
WEIGHT = 0.05  # of one more observation
MIN_BYTES = 64  # shorter prompts are mostly template
CHUNK_BYTES = 64  # a route key's


class TokenRates:
    """Tokens per byte, by pool."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def estimate(self, pool: str, num_bytes: int) -> int:
        """At least one: every request computes something."""
        return 1 + int(num_bytes * self._rates.get(pool, TOKENS_PER_BYTE))

    def per_key(self, pool: str) -> float:
        """Tokens in one route key's chunk of the prompt."""
        return CHUNK_BYTES * self._rates.get(pool, TOKENS_PER_BYTE)

    def learn(self, pool: str, num_bytes: int, num_tokens: int) -> None:
        if num_bytes < MIN_BYTES or num_tokens <= 0:
            return
        seen = num_tokens / num_bytes if num_tokens < num_bytes else 1.0
        rate = self._rates.get(pool)
        self._rates[pool] = seen if rate is None else rate + WEIGHT * (seen - rate)
