"""How long a step will take, learned from the steps that were."""

from __future__ import annotations

FORGET = 0.97  # weight of the past at each new step: about the last thirty count
OUTLIER = 3.0  # a step that took so many times longer than expected is taken for that much only
WARM_UP = 5  # steps of each kind before outliers are recognised
FIRST_CHUNK = 128  # prefill tokens beside decoding sequences, before a prefill was measured


class StepTimeModel:
    """Seconds = base + decode · (sequences that decode) + prefill · (prompt tokens).

    A token guessed ahead counts as one more sequence that decodes.

    The first two are a line through the steps without prefill, with the past fading; prefill is the
    ratio of what the other steps took beyond that line to the tokens they computed.
    """

    def __init__(self) -> None:
        self._num_decode_steps = self._num_prefill_steps = 0
        self._w = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums: 1, n, t, n², n·t
        self._prefill_s = self._prefill_tokens = 0.0
        self._busy_s = self._busy_tokens = 0.0

    def observe(self, num_decodes: int, num_prefill_tokens: int, step_s: float) -> None:
        """One step took so long."""
        self._busy_s = self._busy_s * FORGET + step_s
        self._busy_tokens = self._busy_tokens * FORGET + num_decodes + num_prefill_tokens
        if num_prefill_tokens:
            self._observe_prefill(num_decodes, num_prefill_tokens, step_s)
        else:
            self._observe_decode(num_decodes, step_s)

    def decode_s(self, num_decodes: int) -> float:
        """A step in which so many sequences decode and nothing else happens."""
        if self._w == 0.0 or num_decodes == 0:
            return 0.0
        spread = self._spread
        if spread <= 1e-6 * self._xx * self._w:  # one batch size so far: take all of it as base
            return self._y / self._w
        slope = max(0.0, (self._xy * self._w - self._x * self._y) / spread)
        base = max(0.0, (self._y - slope * self._x) / self._w)
        return base + slope * num_decodes

    def step_s(self, num_decodes: int, num_prefill_tokens: int) -> float:
        """A step of both; 0 while nothing is known."""
        return self.decode_s(num_decodes) + self.prefill_s(num_prefill_tokens)

    def row_s(self) -> float:
        """One sequence more that decodes, or one token guessed ahead; 0 while nothing is known."""
        return self.decode_s(2) - self.decode_s(1)

    @property
    def knows_rows(self) -> bool:
        """Whether steps were of sizes so different, lately, that `row_s` can be relied on."""
        return self._spread > 3e-4 * self._xx * self._w

    def prefill_s(self, num_tokens: int) -> float:
        """So many prompt tokens, alone; 0 while nothing is known."""
        if self._prefill_tokens == 0.0:
            return 0.0
        return num_tokens * self._prefill_s / self._prefill_tokens

    def prefill_tokens(self, step_s: float, *, num_decodes: int) -> int:
        """How many prompt tokens fit in a step of that length beside the sequences that decode."""
        one_s = self.prefill_s(1)
        if one_s == 0.0:
            return FIRST_CHUNK
        return max(0, int((step_s - self.decode_s(num_decodes)) / one_s))

    @property
    def _spread(self) -> float:
        """The variance of sizes of steps without prefill, times the square of all weights."""
        return self._xx * self._w - self._x * self._x

    @property
    def tokens_per_s(self) -> float:
        """Of any kind, lately; 0 while nothing is known."""
        return self._busy_tokens / self._busy_s if self._busy_s > 0.0 else 0.0

    def _observe_decode(self, num_decodes: int, step_s: float) -> None:
        if self._num_decode_steps >= WARM_UP:
            step_s = min(step_s, OUTLIER * self.decode_s(num_decodes))
        self._num_decode_steps += 1
        n = float(num_decodes)
        self._w = self._w * FORGET + 1.0
        self._x = self._x * FORGET + n
        self._y = self._y * FORGET + step_s
        self._xx = self._xx * FORGET + n * n
        self._xy = self._xy * FORGET + n * step_s

    def _observe_prefill(self, num_decodes: int, num_tokens: int, step_s: float) -> None:
        extra_s = max(0.0, step_s - self.decode_s(num_decodes))
        if self._num_prefill_steps >= WARM_UP:
            extra_s = min(extra_s, OUTLIER * self.prefill_s(num_tokens))
        self._num_prefill_steps += 1
        self._prefill_s = self._prefill_s * FORGET + extra_s
        self._prefill_tokens = self._prefill_tokens * FORGET + num_tokens
