"""What becomes of a request that could not be taken in, at once or after it had waited."""

from __future__ import annotations

import logging

from octavo_engine.errors import GenerationFailed, RequestError

logger = logging.getLogger(__name__)


def refusal_of(error: Exception, request_id: str) -> RequestError:
    """What its client gets. What goes wrong with one request ends that request only, also where
    nobody foresaw it; then the log says where it was."""
    if isinstance(error, RequestError):
        return error
    logger.error("Could not take in a request", exc_info=error, extra={"request": request_id})
    return GenerationFailed(f"the engine could not take the request in: {error}")
