"""How much a run of the tests tries: a sample of each sweep, or all with OCTAVO_TEST_FULL=1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def is_full() -> bool:
    return os.environ.get("OCTAVO_TEST_FULL", "") not in ("", "0")


def sample(every: Sequence[T], quick: Sequence[T]) -> Sequence[T]:
    """`quick` stands for `every`: of each kind of thing one."""
    return every if is_full() else quick


def num_examples(full: int, quick: int) -> int:
    """Of random stories, whose seed is fixed: the quick ones are the first of all."""
    return full if is_full() else quick
