"""What the default policy must achieve, and whether it did.

where prompts share prefixes   better than round-robin and least-load: TTFT p50, TTFT p99 and
                               prefilled tokens
where they share nothing       at most 2 % worse than any other policy: TTFT p50, TTFT p99,
                               time between tokens, throughput
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.study.figures import Figures

DEFAULT = "prefix-load"
BEATEN = ("round-robin", "least-load")
TOLERANCE = 0.02

_SHARING = ("ttft_p50_s", "ttft_p99_s", "num_prefilled_tokens")
_LOWER = ("ttft_p50_s", "ttft_p99_s", "itl_mean_s")
_HIGHER = ("output_tokens_per_s",)


class PolicyFinding(NamedTuple):
    """One comparison: `ratio` above 1 speaks for the default policy."""

    workload: str
    figure: str
    other: str
    ratio: float
    is_met: bool

    def __str__(self) -> str:
        word = "met" if self.is_met else "MISSED"
        return f"{word}: {self.workload}, {self.figure}: {self.ratio:.3f} x {self.other}"


def judge_sharing(workload: str, results: Sequence[Figures]) -> list[PolicyFinding]:
    """Better than those that do not look at prefixes, in all that counts."""
    default, others = _split(results)
    findings = []
    for other in others:
        if other.policy not in BEATEN:
            continue
        for name in _SHARING:
            mine, theirs = attrgetter(name)(default), attrgetter(name)(other)
            findings.append(
                PolicyFinding(
                    workload, name, other.policy, theirs / max(mine, 1e-12), mine < theirs
                )
            )
    return findings


def judge_random(workload: str, results: Sequence[Figures]) -> list[PolicyFinding]:
    """Never much worse than the best of the others."""
    default, others = _split(results)
    findings = []
    for name in (*_LOWER, *_HIGHER):
        best = (max if name in _HIGHER else min)(others, key=attrgetter(name))
        mine, theirs = attrgetter(name)(default), attrgetter(name)(best)
        ratio = mine / max(theirs, 1e-12) if name in _HIGHER else theirs / max(mine, 1e-12)
        findings.append(PolicyFinding(workload, name, best.policy, ratio, ratio >= 1 - TOLERANCE))
    return findings


def _split(results: Sequence[Figures]) -> tuple[Figures, list[Figures]]:
    default = next(figures for figures in results if figures.policy == DEFAULT)
    return default, [figures for figures in results if figures is not default]
