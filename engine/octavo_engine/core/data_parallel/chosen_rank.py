"""The core that a request has to go to, where its sender chose one: for all that it submits."""

from __future__ import annotations

from contextvars import ContextVar

CHOSEN_RANK: ContextVar[int | None] = ContextVar("octavo_data_parallel_rank", default=None)
