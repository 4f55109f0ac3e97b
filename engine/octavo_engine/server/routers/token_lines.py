"""The lines that give a router the tokens behind each event; see protocol.resume for their form.

Held-back tokens are sent late, never early: the text of all events so far is what the tokens sent
so far yield, so that a generation can be continued from any event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.protocol.resume import begin_line, token_line

if TYPE_CHECKING:
    from octavo_engine.server.generation.job import Job
    from octavo_engine.server.generation.usage import Usage


class TokenLines:
    """Of one stream. Empty unless the router requests them."""

    def __init__(self, job: Job, usage: Usage, *, id: str, created: int, wanted: bool) -> None:
        self._wanted = wanted
        self._unsent: dict[int, list[int]] = {}  # by answer
        self._job = job
        self._usage = usage
        self._id = id
        self._created = created
        self._has_begun = not wanted

    def note(self, answer: int, token_ids: list[int]) -> None:
        """New tokens, whether or not an event comes of them. Hot path."""
        if self._wanted and token_ids:
            self._unsent.setdefault(answer, []).extend(token_ids)

    def head(self, answer: int) -> bytes:
        """What stands before the next event of the answer: all its tokens not sent yet."""
        return token_line(answer, self._unsent.pop(answer, [])) if self._wanted else b""

    def begun(self, events: bytes) -> bytes:
        """The events to be written; the first ones with the begin line before them."""
        if self._has_begun or not events:
            return events
        self._has_begun = True
        job, usage = self._job, self._usage
        assert job.seed is not None  # it is settled for those who want lines
        begin = begin_line(
            id=self._id,
            created=self._created,
            seed=job.seed,
            answers=len(job.prompts) * job.params.n,
            prompt_tokens=usage.prompt_tokens,
            cached=usage.cached_tokens,
            kv_address=job.kv_address,
        )
        return begin + events
