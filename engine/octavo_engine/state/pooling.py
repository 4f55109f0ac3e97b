"""One text in, vectors or scores out: requests to models that do not generate."""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo_engine.errors import InvalidRequest

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to do with the hidden states of one text."""

    task: PoolingTask = "embed"
    activate: bool | None = None  # normalise, or softmax and sigmoid; None: as the model says
    dimensions: int | None = None  # of an embedding, cut before it is normalised; None: all

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest(
                f"dimensions must be at least 1; got {self.dimensions}", param="dimensions"
            )


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One text. Immutable; crosses the process boundary as msgpack."""

    request_id: str  # unique in this engine's life; made by us, never by a client
    token_ids: list[int]  # at least one; special tokens included
    type_ids: list[int] = []  # of pairs: which text each token is of; empty: all of the first
    params: PoolingParams = PoolingParams()
    arrival_at: float = 0.0  # monotonic seconds
    deadline_at: float | None = None


class PoolingOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to one: float32 in little-endian order, [rows, data / rows]."""

    request_id: str
    data: bytes = b""
    rows: int = 1  # 1 of a whole text, the number of tokens of per-token tasks
    error: str | None = None  # one sentence; data is empty then
