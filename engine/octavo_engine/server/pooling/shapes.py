"""The answers of the pooling endpoints, for the documents and the tests that hold us to them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str  # base64 of the raw numbers if that was requested


class EmbeddingList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingAnswer]
    usage: PoolingUsage


class PooledAnswer(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"]
    data: list[float | list[float]] | str


class PooledList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledAnswer]
    usage: PoolingUsage


class ScoreAnswer(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreAnswer]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct, kw_only=True):
    text: str
    multi_modal: None


class Ranked(msgspec.Struct, kw_only=True):
    index: int  # of the document in the request
    document: RankedDocument | None
    relevance_score: float


class RankingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: RankingUsage
    results: list[Ranked]  # the most relevant first
    meta: dict[str, Any] | None = None  # Cohere's; of /v2/rerank only


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifiedList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """One list a type that was requested."""

    floats: list[list[float]] | None = msgspec.field(name="float", default=None)
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereEmbedding(msgspec.Struct, kw_only=True):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"]
