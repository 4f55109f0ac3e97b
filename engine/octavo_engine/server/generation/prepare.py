"""From a request's body to a Job: the steps that every generating endpoint takes, in one order."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.server.compat.unsupported_fields import refuse_unsupported
from octavo_engine.server.generation.make_job import make_job, with_route
from octavo_engine.server.generation.params import check_sizes, sampling_params
from octavo_engine.server.generation.resume import continued, opened
from octavo_engine.server.generation.structured import note_left_over
from octavo_engine.server.http.request_ids import adopt

if TYPE_CHECKING:
    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.server.generation.job import Job, RouteSource
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.schemas import SamplingFields
    from octavo_engine.server.service import Service
    from octavo_engine.state.sampling_params import SamplingParams


class ProtocolReader(Protocol):
    """What one protocol adds to the steps of `prepare`, which calls the methods in this order."""

    @property
    def fields(self) -> SamplingFields: ...
    @property
    def model(self) -> str | None: ...
    @property
    def request_id(self) -> str | None:
        """The body's own."""

    @property
    def id_prefix(self) -> str: ...

    def check(self) -> None:
        """The protocol's own fields. Raises RequestError."""

    async def prompts(self) -> list[list[int]]:
        """The tokens of each prompt. Raises RequestError."""

    @property
    def media(self) -> PromptMedia | None:
        """Pictures in the first prompt; known once the prompts are."""

    @property
    def max_tokens(self) -> int | None:
        """None fills the context."""

    @property
    def logprobs(self) -> int | None: ...
    @property
    def uses_model_defaults(self) -> bool:
        """Whether the model's generation_config fills what the request leaves open."""

    async def settle(self, params: SamplingParams) -> SamplingParams:
        """With the grammar and whatever else the protocol sets. Raises RequestError."""

    def route(self) -> RouteSource | None:
        """How routers know the first prompt; None: they do not route by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that will run."""

    id: str
    model: str
    created: int
    job: Job
    opened: set[int]  # choices that began before: of a stream that is resumed


async def prepare(exchange: Exchange, service: Service, reader: ProtocolReader) -> PreparedRequest:
    """Raises RequestError for whatever cannot be served."""
    fields, limits = reader.fields, service.settings.limits
    model = await service.model.find(reader.model)
    info = service.engine.info
    check_task("generate", info)
    adopt(exchange, reader.request_id)
    refuse_unsupported(fields)
    check_sizes(fields, limits)
    reader.check()
    prompts = await reader.prompts()
    has_defaults = reader.uses_model_defaults and service.settings.generation_config == "auto"
    params = sampling_params(
        fields,
        max_tokens=reader.max_tokens,
        logprobs=reader.logprobs,
        defaults=info.default_params if has_defaults else {},
        limits=limits,
    )
    params = await reader.settle(params)
    note_left_over(exchange, params.grammar)
    id_ = f"{reader.id_prefix}-{exchange.request_id}"
    job = make_job(service, fields, id_, prompts, params, model, reader.media)
    route = reader.route()
    if route is None:
        return PreparedRequest(id=id_, model=model, created=int(time.time()), job=job, opened=set())
    job = await with_route(exchange, service, job, route)
    resume = exchange.resume
    return PreparedRequest(
        id=id_ if resume is None else resume.id,
        model=model,
        created=int(time.time()) if resume is None else resume.created,
        job=continued(exchange, service, job, stream=bool(fields.stream)),
        opened=opened(resume),
    )
