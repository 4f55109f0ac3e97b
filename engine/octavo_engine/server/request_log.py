"""A log line for each request that comes in, where asked for: its numbers, and no word of it.

At level debug the beginning of the prompt follows, at most as long as --max-log-len allows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo_engine.server.generation import Job
    from octavo_engine.server.service import Service

logger = logging.getLogger("octavo.server.requests")

# Fields whose values are the client's words, or as telling as those.
_WORDS = frozenset(
    ("stop", "bad_words", "bad_words_token_ids", "grammar", "logit_bias", "allowed_token_ids")
)
_DEFAULTS = SamplingParams()


def log_request(service: Service, job: Job) -> None:
    logger.info(
        "Received",
        extra={
            "answer_id": job.request_id,
            "prompts": len(job.prompts) if len(job.prompts) > 1 else None,
            "prompt_tokens": job.prompt_tokens,
            "priority": job.priority or None,
            "deadline_s": job.deadline_s,
            "params": _told(job.params),
        },
    )
    if logger.isEnabledFor(logging.DEBUG):
        limit = service.settings.max_log_len
        for ids in job.prompts:
            shown = ids if limit is None else ids[:limit]
            text = service.engine.tokenizer.decode(shown, skip_special_tokens=False)
            logger.debug(
                "Prompt",
                extra={
                    "answer_id": job.request_id,
                    "prompt": text if limit is None else text[:limit],
                    "prompt_token_ids": shown,
                },
            )


def _told(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults; of words only that there are some."""
    told: dict[str, Any] = {}
    for field in params.__struct_fields__:
        value = getattr(params, field)
        if value != getattr(_DEFAULTS, field):
            told[field] = "(given)" if field in _WORDS else msgspec.to_builtins(value)
    return told
