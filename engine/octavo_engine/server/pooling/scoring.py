"""How well texts fit each other: by a model that reads pairs, or by the angle of two embeddings."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.core.pooling import tokenize
from octavo_engine.core.pooling.async_pooling import check_items
from octavo_engine.errors import ContextLengthExceeded, InvalidRequest, RequestError
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.pooling.items import Truncation, check_count, encoded
from octavo_engine.server.pooling.prompts import prompt_of
from octavo_engine.server.pooling.work import choose, pool
from octavo_engine.state.pooling import PoolingParams
from octavo_engine.tokenization.threads import off_loop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.pooling.async_pooling import PoolingItem
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.pooling.bodies import ScoringFields
    from octavo_engine.server.pooling.work import PreparedPooling
    from octavo_engine.server.service import Service
    from octavo_engine.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Texts to compare: one with one, one with many, or many with as many."""

    first: list[str]
    second: list[str]
    names: tuple[str, str]  # what the client calls them


@dataclass(frozen=True, slots=True)
class PairScores:
    """One score a pair, and every text that was read for them."""

    values: list[float]
    items: list[PoolingItem]


async def score_sides(
    exchange: Exchange,
    service: Service,
    prepared: PreparedPooling,
    request: ScoringFields,
    sides: Sides,
) -> PairScores:
    """Raises RequestError."""
    if request.instruction:
        raise not_supported("instruction", "put it into the texts of the query's side")
    if request.chat_template_kwargs:
        raise not_supported("chat_template_kwargs", "pairs are not written by a template")
    _check(sides, service.settings.limits.max_pooling_items)
    task = choose(service, "score", "embed", "token_embed")
    sides = await _shortened(service, request, sides)
    by = _by_pairs if task == "score" else _by_vectors
    with _naming(sides.names[1]):  # of what all texts have in common
        return await by(exchange, service, prepared, request, sides)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """An error of the input becomes one of the field that its client knows."""
    try:
        yield
    except RequestError as error:
        if error.param == "input":
            error.param = field
            begin = next((b for b in ("the input", "input") if error.message.startswith(b)), "")
            if begin:
                error.message = field + error.message[len(begin) :]
        raise


async def _by_pairs(
    exchange: Exchange,
    service: Service,
    prepared: PreparedPooling,
    request: ScoringFields,
    sides: Sides,
) -> PairScores:
    engine = service.engine
    info, tokenizer = engine.info, engine.tokenizer
    cut = Truncation.of(request, info.max_model_len)
    if cut.keep is not None and cut.side == "left":
        raise InvalidRequest("pairs are cut at their right end only", param="truncation_side")
    first = sides.first * (len(sides.second) if len(sides.first) == 1 else 1)
    room = cut.keep or info.max_model_len

    def work() -> list[PoolingItem]:
        items = []
        for index, (a, b) in enumerate(zip(first, sides.second, strict=True)):
            item = tokenize.pair(tokenizer, a, b, None if cut.keep is None else room)
            if len(item.token_ids) > room:
                raise ContextLengthExceeded(
                    f"pair {index} has {len(item.token_ids)} tokens, but the model takes at most "
                    f"{room}; shorten it, or ask for truncate_prompt_tokens or max_tokens_per_doc",
                    param=sides.names[1],
                )
            items.append(item)
        return items

    items = await off_loop(work, _num_chars(first) + _num_chars(sides.second))
    params = PoolingParams(task="score", activate=request.activate)
    rows = await pool(exchange, service, prepared, items, params)
    return PairScores([float(row[0]) for row in rows], items)


async def _by_vectors(
    exchange: Exchange,
    service: Service,
    prepared: PreparedPooling,
    request: ScoringFields,
    sides: Sides,
) -> PairScores:
    """Each text is read once, however often it is compared."""
    engine = service.engine
    cut = Truncation.of(request, engine.info.max_model_len)
    first, second = prompts_of(engine.info, sides.names)
    items: list[PoolingItem] = []
    is_per_token = "embed" not in engine.info.tasks
    params = PoolingParams(task="token_embed" if is_per_token else "embed")
    for prompt, texts, name in zip((first, second), (sides.first, sides.second), sides.names,
                                   strict=True):  # fmt: skip
        with _naming(name):
            side = await encoded(
                engine.tokenizer, [prompt + text for text in texts], special=True, cut=cut
            )
            check_items(side, params, engine.info)
        items += side
    rows = await pool(exchange, service, prepared, items, params)
    count = len(sides.first)
    if is_per_token:
        return PairScores(best_matches(rows[:count], rows[count:]), items)
    return PairScores(cosines(np.stack(rows[:count]), np.stack(rows[count:])), items)


def prompts_of(info: ModelInfo, names: tuple[str, str]) -> tuple[str, str]:
    """What goes before each side: a query's and a document's prompt, where the names say so."""
    if names[0] in ("query", "queries"):
        return prompt_of(info, "search_query"), prompt_of(info, "search_document")
    return prompt_of(info, None), prompt_of(info, None)


def cosines(first: NDArray[np.float32], second: NDArray[np.float32]) -> list[float]:
    """Row by row; a single first row with every second one. 0 for vectors of no length."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    products = np.sum(a * b, axis=1)
    values: list[float] = np.divide(
        products, lengths, out=np.zeros_like(products), where=lengths > 0
    ).tolist()
    return values


def best_matches(
    first: Sequence[NDArray[np.float32]], second: Sequence[NDArray[np.float32]]
) -> list[float]:
    """Of each token of a first text its product with the best of the second's, summed up."""
    repeated = list(first) * (len(second) if len(first) == 1 else 1)
    return [
        float((a.astype(np.float64) @ b.astype(np.float64).T).max(axis=1).sum())
        for a, b in zip(repeated, second, strict=True)
    ]


async def _shortened(service: Service, request: ScoringFields, sides: Sides) -> Sides:
    """With the texts cut to the tokens that each side may have."""
    limits = (request.max_tokens_per_query, request.max_tokens_per_doc)
    names = ("max_tokens_per_query", "max_tokens_per_doc")
    cut: list[list[str]] = []
    for texts, limit, name in zip((sides.first, sides.second), limits, names, strict=True):
        if limit is None:
            cut.append(texts)
            continue
        if limit < 1:
            raise InvalidRequest(f"{name} must be at least 1; got {limit}", param=name)
        cut.append(await _cut_texts(service.engine.tokenizer, texts, limit))
    return Sides(first=cut[0], second=cut[1], names=sides.names)


async def _cut_texts(tokenizer: Tokenizer, texts: list[str], limit: int) -> list[str]:
    return await off_loop(
        lambda: [beginning(tokenizer, text, limit) for text in texts], _num_chars(texts)
    )


def beginning(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """The longest beginning that has at most so many tokens, found by halving."""

    def fits(length: int) -> bool:
        return len(tokenizer.encode(text[:length], add_special_tokens=False)) <= limit

    if fits(len(text)):
        return text
    low, high = 0, len(text)  # `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return text[:low]


def _check(sides: Sides, limit: int) -> None:
    for texts, name in zip((sides.first, sides.second), sides.names, strict=True):
        if not texts:
            raise InvalidRequest(f"{name} is empty; it needs at least one text", param=name)
        if not all(texts):
            raise InvalidRequest(f"{name} holds an empty text", param=name)
    check_count(len(sides.second), limit, sides.names[1])
    if len(sides.first) not in (1, len(sides.second)):
        raise InvalidRequest(
            f"{sides.names[0]} must hold one text, or as many as {sides.names[1]}; got "
            f"{len(sides.first)} and {len(sides.second)}",
            param=sides.names[0],
        )


def _num_chars(texts: Sequence[str]) -> int:
    return sum(map(len, texts))
