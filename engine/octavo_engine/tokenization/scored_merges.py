"""The merges of a vocabulary whose pieces have scores instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def merges_by_score(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that scored pieces imply: every way to build each, the best piece first."""
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in scores.items():
        cuts = [
            (token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in vocab and token[i:] in vocab
        ]
        cuts.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, len(left), len(right), (left, right)) for left, right in cuts]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [pair for _, _, _, pair in merges]
