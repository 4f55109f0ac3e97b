"""POST /generative_scoring: how likely a model goes on with each of some tokens, per item.

Log-probabilities are of the model's own distribution over all tokens, whatever it would say. One
run covers as many labels as `logprob_token_ids` holds; further ones find their prompt in the
prefix cache.
"""

from __future__ import annotations

import math
import time
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.generation.gather import all_of
from octavo_engine.server.generation.make_job import make_job
from octavo_engine.server.generation.prompts import encode
from octavo_engine.server.generation.run import collect_outputs
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.request_ids import adopt
from octavo_engine.server.openai.schemas import SamplingFields
from octavo_engine.server.service import Service  # noqa: TC001
from octavo_engine.state.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams

if TYPE_CHECKING:
    from octavo_engine.server.generation.job import Job

Text = str | list[int]


class GenerativeScoringRequest(msgspec.Struct, kw_only=True):
    """The query comes before each item, or behind it with `item_first`."""

    query: Text
    items: list[Text]
    label_token_ids: list[int]
    apply_softmax: bool = True  # over the labels; false: probabilities among all tokens
    item_first: bool = False
    add_special_tokens: bool | None = None
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None


class LabelScores(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float  # of the first label
    probs: list[float]  # of each label


class GenerativeScores(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[LabelScores]
    usage: dict[str, Any]


async def generative_scoring(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(GenerativeScoringRequest)
    model = service.model.check_name(request.model)
    check_task("generate", service.engine.info)
    adopt(exchange, request.request_id)
    _check(service, request)
    id_ = f"score-{exchange.request_id}"
    prompts = [await _prompt(service, request, item) for item in request.items]
    labels = request.label_token_ids
    jobs = [
        _job(service, request, model, id_, prompts, labels[start : start + MAX_LOGPROB_TOKEN_IDS])
        for start in range(0, len(labels), MAX_LOGPROB_TOKEN_IDS)
    ]
    async with exchange.while_present():
        # [part of the labels][item][label]
        logprobs = await all_of([_logprobs(service, job) for job in jobs])
    count = sum(map(len, prompts))
    answer = GenerativeScores(
        id=id_,
        created=int(time.time()),
        model=model,
        data=[
            _scores(index, [*chain(*parts)], softmax=request.apply_softmax)
            for index, parts in enumerate(zip(*logprobs, strict=True))
        ],
        usage={
            "prompt_tokens": count, "total_tokens": count, "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    )  # fmt: skip
    await exchange.reply(msgspec.json.encode(answer))


def _check(service: Service, request: GenerativeScoringRequest) -> None:
    labels, vocab_size = request.label_token_ids, service.engine.info.vocab_size
    if not labels or len(set(labels)) != len(labels):
        raise InvalidRequest(
            "label_token_ids needs at least one id, and none twice", param="label_token_ids"
        )
    for label in labels:
        if not 0 <= label < vocab_size:
            raise InvalidRequest(
                f"label_token_ids: token id {label} is not in the vocabulary of {vocab_size}",
                param="label_token_ids",
            )
    if not request.items:
        raise InvalidRequest("items needs at least one item", param="items")
    limit = service.settings.limits.max_sequences
    if math.ceil(len(labels) / MAX_LOGPROB_TOKEN_IDS) * len(request.items) > limit:
        raise InvalidRequest(
            f"{len(request.items)} items with {len(labels)} labels each are more than {limit} "
            f"prompts, at {MAX_LOGPROB_TOKEN_IDS} labels a prompt",
            param="items",
        )
    if isinstance(request.query, list) and any(isinstance(item, str) for item in request.items):
        raise InvalidRequest("query and items must both be texts, or both ids", param="items")
    if isinstance(request.query, str) and any(isinstance(item, list) for item in request.items):
        raise InvalidRequest("query and items must both be texts, or both ids", param="items")


async def _prompt(service: Service, request: GenerativeScoringRequest, item: Text) -> list[int]:
    query = request.query
    if isinstance(query, list) and isinstance(item, list):
        return item + query if request.item_first else query + item
    text = f"{item}{query}" if request.item_first else f"{query}{item}"
    special = request.add_special_tokens is not False
    most = service.engine.info.max_model_len
    return await encode(service.engine.tokenizer, text, add_special_tokens=special, most=most)


def _job(
    service: Service, request: GenerativeScoringRequest, model: str, id_: str,
    prompts: list[list[int]], labels: list[int],
) -> Job:  # fmt: skip
    fields = SamplingFields(cache_salt=request.cache_salt, priority=request.priority)
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprob_token_ids=tuple(labels), detokenize=False
    )
    return make_job(service, fields, id_, prompts, params, model)


async def _logprobs(service: Service, job: Job) -> list[list[float]]:
    """Of the job's labels, for each prompt."""
    values: list[list[float]] = [[] for _ in job.prompts]
    for result in await collect_outputs(service, job):
        for output in result.output.outputs:
            for entry in output.logprobs or ():
                values[result.prompt_index] = [choice.logprob for choice in entry.top]
    return values


def _scores(index: int, logprobs: list[float], *, softmax: bool) -> LabelScores:
    top = max(logprobs)
    if softmax and math.isfinite(top):
        weights = [math.exp(value - top) for value in logprobs]
        probs = [weight / sum(weights) for weight in weights]
    else:
        probs = [math.exp(value) for value in logprobs]
    return LabelScores(index=index, score=probs[0], probs=probs)
