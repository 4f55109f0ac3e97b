"""Events of answers that are lists of items: with lines for routers, and without what was sent.

A resumed stream makes all its events anew; those that its client has seen are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.server.http.resume_frame import bad_frame
from octavo_engine.server.routers.token_lines import TokenLines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.server.generation.usage import Usage
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.chat.prepare import PreparedChat


class ItemEvents:
    """Of one stream: what is added, until it is taken to be written."""

    def __init__(self, exchange: Exchange, prepared: PreparedChat, usage: Usage) -> None:
        """Raises RequestError where the stream cannot be resumed so."""
        job, resume = prepared.job, exchange.resume
        # Log-probabilities of the tokens so far could not be said again at the end of the text.
        wanted = exchange.wants_tokens and job.params.logprobs is None
        self._lines = TokenLines(
            job, usage, id=prepared.id, created=prepared.created, wanted=wanted
        )
        if resume is not None and any(resume.tokens) and not resume.pieces:
            raise bad_frame("pieces are missing; an answer of items is resumed with them")
        self._num_seen = 0 if resume is None else resume.events
        self._frames: list[bytes] = []

    def add(self, events: Iterable[bytes], new_ids: list[int] | None = None) -> None:
        """`new_ids`: the tokens that these events came of, unless routers know them."""
        if new_ids:
            self._lines.note(0, new_ids)
        for event in events:
            if self._num_seen:
                self._num_seen -= 1
            else:
                self._frames += (self._lines.head(0), event)

    def take(self, last: bytes = b"") -> bytes:
        """`last`: the event that ends the stream."""
        frames, self._frames = self._frames, []
        return self._lines.begun(b"".join((*frames, last)))
