"""Labels for requests: the route keys of the prompt, and of how the conversation will go on."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import RequestError
from octavo_engine.protocol import route_keys
from octavo_engine.server.routers.label_offsets import (
    TokenEnds,
    label_ids,
    label_text,
    place_pictures,
)
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from octavo_engine.core.kv_events.residency_feed import ResidencyFeed
    from octavo_engine.core.media.prompt import PicturePlace
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.protocol.route_keys import Canonical, Kind
    from octavo_engine.state.labels import Labels
    from octavo_engine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger("octavo.server")

_INLINE_BYTES = 1 << 15  # longer prompts are looked at in a thread
_CONTEXT = 64  # tokens before an answer among which a control token is looked for
_OVERLAP = 8  # tokens before an answer that are read again where there is none
_ANSWER_LEAD = 8  # blocks of the prompt's end that an answer may still give names to
_MAX_PENDING = 256  # answers that wait to be labelled; beyond that they go without


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """How a request is known to routers; kept until its answer is there."""

    canonical: Canonical
    names: list[int]  # what comes before the first text, then the keys of all whole chunks
    prompt: bytes  # as it was rendered
    ids: Sequence[int]
    labels: Labels | None
    render_next: Callable[[str], Awaitable[str]] | None  # the next turn's prompt; None: unknown
    pictures: Sequence[PicturePlace] = ()  # among the ids


class Answers:
    """What came out for each choice of one prompt, joined from its outputs."""

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}
        self._texts: dict[int, list[str]] = {}
        self._whole: dict[int, str] = {}  # the core's name of each that is complete here

    def add(self, result: RequestOutput) -> None:
        """Hot path: once per output."""
        for output in result.outputs:
            index = output.index
            ids = self._ids.setdefault(index, [])
            ids += output.token_ids
            self._texts.setdefault(index, []).append(output.text)
            # A resumed answer began elsewhere: what is here is not all of it.
            if output.finish_reason is not None and output.num_tokens == len(ids):
                self._whole[index] = output.sequence_id

    def whole(self) -> list[tuple[str, list[int], str]]:
        """(the core's name, tokens, text) of each."""
        return [
            (name, self._ids[index], "".join(self._texts[index]))
            for index, name in self._whole.items()
        ]


class Labeller:
    """Belongs to the event loop. What it cannot map gets no labels; it never fails a request."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, feed: ResidencyFeed) -> None:
        self._tokenizer = tokenizer
        self._feed = feed
        self._ends = TokenEnds(tokenizer, vocab_size)
        # A byte is a token there, whatever comes after it.
        self._merges = not isinstance(tokenizer, ByteTokenizer)
        self._pending: set[asyncio.Task[None]] = set()

    async def route(
        self,
        body: Mapping[str, Any],
        kind: Kind,
        ids: Sequence[int],
        text: str | None = None,
        *,
        render_next: Callable[[str], Awaitable[str]] | None = None,
        adapter: str = "",
        pictures: Sequence[PicturePlace] = (),
    ) -> RoutedPrompt | None:
        """Of a request's first prompt: `ids`, and `text`, as it was rendered if it is a chat, with
        one placeholder for all that stands for a picture; `adapter`: the digest of its content."""
        if body.get("truncate_prompt_tokens") is not None:
            return None  # where the prompt begins depends on how it ends
        if len(ids) <= _INLINE_BYTES // 4:
            return self._route(body, kind, ids, text, render_next, adapter, pictures)
        return await asyncio.to_thread(
            self._route, body, kind, ids, text, render_next, adapter, pictures
        )

    def _route(
        self, body: Mapping[str, Any], kind: Kind, ids: Sequence[int], text: str | None,
        render_next: Callable[[str], Awaitable[str]] | None, adapter: str,
        pictures: Sequence[PicturePlace],
    ) -> RoutedPrompt | None:  # fmt: skip
        try:
            canonical = route_keys.canonical(body, kind=kind, adapter=adapter)
            if canonical is None:
                return None
            keys = route_keys.chain(canonical.root, canonical.data)
            if canonical.form == "ids":
                return RoutedPrompt(canonical, keys, b"", ids, label_ids(keys), None)
            prompt = canonical.data if text is None else text.encode()
            names = [route_keys.opening(canonical), *keys]
            ends = self._ends(ids, prompt, pictures=pictures)
            labels = self._labels(canonical, names, prompt, ends, pictures)
        except Exception:  # routing would only be worse for it; answering matters more
            logger.exception("Could not label a request")
            return None
        if canonical.is_open:
            render_next = None
        return RoutedPrompt(canonical, names, prompt, ids, labels, render_next, pictures)

    def _labels(
        self, canonical: Canonical, names: list[int], text: bytes, ends: NDArray[np.int64],
        spans: Sequence[PicturePlace], num_found: int | None = None, first_block: int = 0,
    ) -> Labels | None:  # fmt: skip
        pictures = place_pictures(canonical, ends, spans) if spans else None
        if spans and pictures is None:
            return None
        return label_text(
            canonical, names, text, ends, merges=self._merges, num_found=num_found,
            first_block=first_block, pictures=pictures,
        )  # fmt: skip

    # ── answers ──

    def settle(self, route: RoutedPrompt, answers: Answers) -> None:
        """Label the answers of a chat, so that its next turn is known too. Returns at once."""
        if route.render_next is None or route.labels is None:
            return
        if len(self._pending) >= _MAX_PENDING:
            return
        task = asyncio.create_task(self._settle(route, answers), name="octavo-label")
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def idle(self) -> None:
        """Returns when all answers that were settled are labelled."""
        while self._pending:
            await asyncio.wait(self._pending)

    async def _settle(self, route: RoutedPrompt, answers: Answers) -> None:
        assert route.render_next is not None
        for sequence_id, ids, text in answers.whole():
            try:
                following = await route.render_next(text)
                if len(following) <= _INLINE_BYTES:
                    labels = self.label_answer(route, ids, text, following)
                else:
                    labels = await asyncio.to_thread(self.label_answer, route, ids, text, following)
            except RequestError:  # the template takes no further turn
                return
            except Exception:
                logger.exception("Could not label an answer")
                return
            if labels is not None:
                self._feed.label(sequence_id, labels)

    def label_answer(
        self, route: RoutedPrompt, answer_ids: list[int], answer: str, following: str
    ) -> Labels | None:
        """Labels for what the next turn's prompt, `following`, will find of this answer.

        What counts are the tokens that the next turn really has: as far as it reads the answer as
        other tokens than were generated, or its template writes it differently, nothing is said.
        """
        canonical = route_keys.continuation(route.canonical, answer)
        if canonical is None:
            return None
        text = following.encode()
        ids = [*route.ids, *answer_ids]
        num_prompt = len(route.ids)
        ends = self._ends(ids, text, whole=False, pictures=route.pictures)
        first = self._first_to_read_again(route)
        begin = int(ends[first - 1]) if first else 0
        if not text.startswith(route.prompt[:begin]):
            return None
        try:
            again = self._tokenizer.encode(text[begin:].decode(), add_special_tokens=False)
        except UnicodeDecodeError:  # a character of several tokens
            return None
        same = first + _num_common(ids[first:], again)
        if same < num_prompt:
            return None
        names = route.names[:1] + route_keys.chain(
            canonical.root, canonical.data, known=route.names[1:]
        )
        return self._labels(
            canonical, names, text, ends[:same], route.pictures,
            num_found=min(same, len(ids) - 1),  # the last token was sampled and never computed
            first_block=max(0, num_prompt // BLOCK_SIZE - _ANSWER_LEAD),
        )  # fmt: skip

    def _first_to_read_again(self, route: RoutedPrompt) -> int:
        """From a control token on text is read alike, whatever stands before it."""
        ids, special = route.ids, self._tokenizer.special_ids
        after_pictures = max((span.end for span in route.pictures), default=0)
        for place in range(len(ids) - 1, max(after_pictures, len(ids) - _CONTEXT) - 1, -1):
            if ids[place] in special:
                return place
        return max(after_pictures, len(ids) - _OVERLAP)


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    size = min(len(left), len(right))
    differ = np.flatnonzero(np.array(left[:size]) != np.array(right[:size]))
    return int(differ[0]) if len(differ) else size
