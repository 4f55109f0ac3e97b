"""Log lines for requests that come in and for answers that are done, where requested: their
numbers, and no word of them.

At level debug the beginning of the text follows, at most as long as --max-log-len allows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
    from octavo_engine.server.generation.job import Job
    from octavo_engine.server.service import Service

logger = logging.getLogger("octavo.server.requests")

# Fields whose values are the client's words, or reveal as much.
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
            "params": _non_default(job.params),
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


class OutputLog:
    """Of one request. Texts are kept only where they will be shown."""

    def __init__(self, service: Service, job: Job) -> None:
        self._job = job
        self._limit = service.settings.max_log_len
        self._shows_text = logger.isEnabledFor(logging.DEBUG)
        self._texts: dict[tuple[int, int], str] = {}

    def note(self, prompt_index: int, result: RequestOutput) -> None:
        for output in result.outputs:
            place = (prompt_index, output.index)
            if self._shows_text:
                self._texts[place] = (self._texts.get(place, "") + output.text)[: self._limit]
            if output.finish_reason is not None:
                self._log(place, output)

    def _log(self, place: tuple[int, int], output: CompletionOutput) -> None:
        about = {
            "answer_id": self._job.request_id,
            "prompt_index": place[0] or None,
            "index": place[1] or None,
        }
        logger.info(
            "Generated",
            extra={
                **about,
                "tokens": output.num_tokens,
                "finish_reason": output.finish_reason,
                "stop_token": output.stop_reason if isinstance(output.stop_reason, int) else None,
            },
        )
        if self._shows_text:
            logger.debug("Text", extra={**about, "text": self._texts.pop(place)})


def _non_default(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults; of words only that there are some."""
    given: dict[str, Any] = {}
    for field in params.__struct_fields__:
        value = getattr(params, field)
        if value != getattr(_DEFAULTS, field):
            given[field] = "(given)" if field in _WORDS else msgspec.to_builtins(value)
    return given
