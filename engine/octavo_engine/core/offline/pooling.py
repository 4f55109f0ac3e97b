"""Vectors and scores in Python: what `LLM` offers of models that pool."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np

from octavo_engine.core.pooling.async_pooling import (
    PER_TOKEN,
    PoolingItem,
    as_array,
    check_items,
    check_task,
)
from octavo_engine.core.pooling.tokenize import batch, pair, prompt_of, whole_pair
from octavo_engine.errors import GenerationFailed, InvalidRequest, OctavoError, RequestError
from octavo_engine.state.pooling import PoolingParams, PoolingRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.offline.engine import OfflineEngine
    from octavo_engine.state.pooling import PoolingTask
    from octavo_engine.tokenization.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pooled:
    """What `encode` gives: [columns] of a whole text, [tokens, columns] of per-token tasks."""

    data: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embedding:
    """One text as a vector."""

    embedding: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Classification:
    """How likely each label is."""

    probs: NDArray[np.float32]
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """The likeliest."""
        return self.labels[int(self.probs.argmax())]


@dataclass(frozen=True, slots=True)
class Score:
    """How well two texts fit together."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingResult(Generic[T]):
    """The answer to one text or pair."""

    request_id: str
    prompt: str | None  # None of token ids
    prompt_token_ids: list[int]
    outputs: T


class PoolingMethods:
    """The part of `LLM` that is for models that pool. Loading is the rest's."""

    _engine: OfflineEngine
    _info: ModelInfo
    _tokenizer: Tokenizer
    _closed: bool
    _num_pooled = 0  # texts so far: what is left of an interrupted call is not taken for the next

    def embed(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> list[PoolingResult[Embedding]]:
        """A vector for each text, in their order. A list of ints is one text of token ids.

        `dimensions` cuts vectors of models that were trained for it; `normalize` None does as the
        model says; `prompt_name` chooses one of the model's own prompts, such as "query". A text
        that is too long is an error unless it may be truncated.

        >>> llm = LLM("demo://minilm")
        >>> llm.embed(["a cat", "a dog"])[0].outputs.embedding.shape
        (384,)
        """
        params = PoolingParams(task="embed", activate=normalize, dimensions=dimensions)
        texts, items = self._items(prompts, truncate, prompt_name)
        return self._results(texts, items, self._pool(items, params), Embedding)

    def encode(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        pooling_task: PoolingTask = "token_embed",
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> list[PoolingResult[Pooled]]:
        """The model's rows for any of its tasks: of token_embed a vector for each token."""
        params = PoolingParams(task=pooling_task, activate=normalize)
        texts, items = self._items(prompts, truncate, prompt_name)
        return self._results(texts, items, self._pool(items, params), Pooled)

    def classify(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        activate: bool | None = None,
        truncate: bool = False,
    ) -> list[PoolingResult[Classification]]:
        """The probability of each of the model's labels; its logits if not activated."""
        params = PoolingParams(task="classify", activate=activate)
        texts, items = self._items(prompts, truncate, None)
        labels = self._info.labels
        rows = self._pool(items, params)
        return self._results(texts, items, rows, lambda row: Classification(row, labels))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        activate: bool | None = None,
        truncate: bool = False,
    ) -> list[PoolingResult[Score]]:
        """How well each pair fits; one text on the left goes with all on the right.

        A cross-encoder reads both at once. Of a model that embeds it is the cosine of the two.
        """
        left = [data_1] if isinstance(data_1, str) else list(data_1)
        right = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(left) == 1:
            left *= len(right)
        if len(left) != len(right):
            raise InvalidRequest(
                f"{len(left)} texts on the left, {len(right)} on the right", param="data_2"
            )
        if "embed" in self._info.tasks:
            return self._cosines(left, right, truncate)
        check_task("score", self._info)
        make = pair if truncate else whole_pair
        length = self._info.max_model_len
        items = [make(self._tokenizer, a, b, length) for a, b in zip(left, right, strict=True)]
        rows = self._pool(items, PoolingParams(task="score", activate=activate))
        return self._results([None] * len(items), items, rows, lambda row: Score(float(row[0])))

    def _cosines(
        self, left: list[str], right: list[str], truncate: bool
    ) -> list[PoolingResult[Score]]:
        """Each text is computed once, however often it is compared."""
        unique = list(dict.fromkeys([*left, *right]))
        vectors = {
            result.prompt: result.outputs.embedding
            for result in self.embed(unique, normalize=True, truncate=truncate)
        }
        return [
            PoolingResult(str(i), None, [], Score(_cosine(vectors[a], vectors[b])))
            for i, (a, b) in enumerate(zip(left, right, strict=True))
        ]

    def _items(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        truncate: bool,
        prompt_name: str | None,
    ) -> tuple[list[str | None], list[PoolingItem]]:
        listed = _as_list(prompts)
        prefix = prompt_of(self._info, prompt_name)
        length = self._info.max_model_len
        texts = [text if isinstance(text, str) else None for text in listed]
        whole = [prefix + text for text in texts if text is not None]
        encoded = iter(batch(self._tokenizer, whole, length, truncate))
        items = []
        for given in listed:
            if isinstance(given, str):
                items.append(next(encoded))
            else:
                items.append(PoolingItem(list(given)[:length] if truncate else list(given)))
        return texts, items

    def _pool(
        self, items: Sequence[PoolingItem], params: PoolingParams
    ) -> list[NDArray[np.float32]]:
        """Ctrl-C between two steps leaves nothing behind."""
        if self._closed:
            raise OctavoError("this LLM was closed; make a new one")
        check_items(items, params, self._info)
        first, self._num_pooled = self._num_pooled, self._num_pooled + len(items)
        ids = [str(first + i) for i in range(len(items))]
        arrival_at = time.monotonic()
        self._engine.add_pooling(
            [
                PoolingRequest(
                    request_id=request_id,
                    token_ids=item.token_ids,
                    type_ids=list(item.type_ids),
                    params=params,
                    arrival_at=arrival_at,
                )
                for request_id, item in zip(ids, items, strict=True)
            ]
        )
        found: dict[str, NDArray[np.float32]] = {}
        failed: RequestError | None = None
        try:
            while self._engine.has_work:
                for output in self._engine.step().pooled:
                    try:
                        rows = as_array(output, is_per_token=params.task in PER_TOKEN)
                        found[output.request_id] = rows
                    except GenerationFailed as error:
                        error.add_note(f"in prompt {int(output.request_id) - first}")
                        failed = error
                for request_id, refusal in self._engine.take_refused():
                    refusal.add_note(f"in prompt {int(request_id) - first}")
                    failed = refusal
        finally:
            for request_id in ids:
                self._engine.abort(request_id)
        if failed is not None:
            raise failed
        return [found[request_id] for request_id in ids]

    def _results(
        self,
        texts: Sequence[str | None],
        items: Sequence[PoolingItem],
        rows: Sequence[NDArray[np.float32]],
        make: Callable[[NDArray[np.float32]], T],
    ) -> list[PoolingResult[T]]:
        return [
            PoolingResult(str(index), text, item.token_ids, make(row))
            for index, (text, item, row) in enumerate(zip(texts, items, rows, strict=True))
        ]


def _as_list(
    prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
) -> Sequence[str | Sequence[int]]:
    """One text, or one of token ids, as a list of one."""
    is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    return cast("Sequence[str | Sequence[int]]", [prompts] if is_one else prompts)


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Of two vectors of length 1."""
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))
