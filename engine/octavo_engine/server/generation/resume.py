"""Going on with a generation that another engine began: reads and checks what a router knows of it.

The headers are honoured for every sender: a resumed request costs its sender what any request
with so many prompt tokens costs, says nothing that `return_token_ids` would not say, and needs the
API key like every other. There is nothing to be trusted, so there is no switch.

Only streams are resumed. Of a request that is not streamed its client has seen nothing until all is
there, so a lost one is sent again.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from octavo_engine.config import join_address, split_address
from octavo_engine.core.seeds import prompt_seed
from octavo_engine.core.text.resumed import ResumedOutput
from octavo_engine.errors import ContextLengthExceeded
from octavo_engine.protocol.endpoints import RESUME_HEADER
from octavo_engine.server.http.resume_frame import bad_frame
from octavo_engine.state.kv_source import KVSource

if TYPE_CHECKING:
    from octavo_engine.protocol.resume import Resume
    from octavo_engine.server.generation.job import Job
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.service import Service

_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,160}")
_MAX_DEPTH = 8
_MAX_TOKEN_ID = 2**31 - 1


def opened(resume: Resume | None) -> set[int]:
    """The answers of which the client has seen an event."""
    if resume is None:
        return set()
    begun = (index for index, ids in enumerate(resume.tokens) if ids)
    return {*resume.opened, *resume.finished, *begun}


def continued(exchange: Exchange, service: Service, job: Job, *, stream: bool) -> Job:
    """The job with known seeds and the resumed output, for routers. Raises RequestError."""
    resume = exchange.resume
    if resume is None and not (stream and exchange.wants_tokens):
        return job
    given = job.params.seed
    if resume is None:
        seed = prompt_seed(service.engine.settle_seed(given), 0)
    elif not stream:
        raise bad_frame(
            "only a streamed answer can be resumed; send the request again without the header"
        )
    elif given is not None and given != resume.seed:
        raise bad_frame(f"the seed was {resume.seed}, but the request has {given}")
    else:
        seed = resume.seed
    numbers = range(len(job.prompts))
    served = service.engine.info.kv_source
    return dataclasses.replace(
        job,
        seed=seed,
        seeds=tuple(seed if given is not None else prompt_seed(seed, number) for number in numbers),
        resumed=() if resume is None else _resumed(resume, job, service),
        kv_address="" if served is None else join_address(served.host, served.port),
        kv_source=_source(resume, service) or job.kv_source,
    )


def _source(resume: Resume | None, service: Service) -> KVSource | None:
    """The engine that began it, which may still have its blocks."""
    config = service.engine.config.own_kv_transfer
    if resume is None or not resume.kv_address or config is None or not config.consumes:
        return None
    return KVSource(*split_address(resume.kv_address))


def _resumed(resume: Resume, job: Job, service: Service) -> tuple[ResumedOutput, ...]:
    """All of it is checked before the first prompt runs."""
    n, info = job.params.n, service.engine.info
    if len(resume.tokens) != len(job.prompts) * n:
        raise bad_frame(
            f"tokens holds {len(resume.tokens)} answers, but {len(job.prompts)} prompts times "
            f"n = {n} have {len(job.prompts) * n}"
        )
    for index, ids in enumerate(resume.tokens):
        if ids and max(ids) >= info.vocab_size:
            raise bad_frame(
                f"token id {max(ids)} is not in the vocabulary of {info.vocab_size}: the engines "
                "do not serve the same model"
            )
        limit = job.params.max_tokens
        if limit is not None and len(ids) > limit:
            raise bad_frame(
                f"answer {index} has {len(ids)} tokens already, but max_tokens is {limit}"
            )
        length = len(job.prompts[index // n]) + len(ids)
        if length > info.max_model_len:
            raise ContextLengthExceeded(
                f"{RESUME_HEADER}: prompt and answer {index} have {length} tokens, but the model's "
                f"context holds {info.max_model_len}",
                param=RESUME_HEADER,
            )
    finished, pieces = set(resume.finished), tuple(resume.pieces)
    return tuple(
        ResumedOutput(ids, index in finished, pieces) for index, ids in enumerate(resume.tokens)
    )
