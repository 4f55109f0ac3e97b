"""What the router must remember of a stream to go on with it on another engine, and when it may.

Pure: bytes in, bytes out, no sockets. The proxy feeds a `StreamMemory` with what an engine sends,
relays what comes back, and when the engine is lost sends `resume_body` to another one and feeds on.

What may follow a loss, by what the client has seen:

    nothing (`is_untouched`)     the request is repeated as it was, streamed or not
    events (`can_resume`)        it is resumed from the tokens behind them
    all but [DONE] (`missing`)   the router writes the end itself
    its end or a final error     it is over

Fencing. Whoever takes over first closes the connection of the attempt before, so that an engine
which lives after all stops within a step, and nothing of it can reach the client any more: a
`StreamMemory` belongs to one attempt at a time, `start_over` empties it of half events, and the
stream that follows must name the same generation. A request that is not streamed has shown its
client nothing until its last byte; a lost one is repeated under the same rule (close, then send
again, at most one answer is relayed), which costs tokens but never a second answer.
"""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING

from octavo_engine.protocol.resume import BEGIN, Resume, pack
from octavo_router.proxy.stream_form import CHUNKS, DONE
from octavo_router.proxy.token_stream import MAX_EVENT_BYTES, EventCutter, MalformedStream
from octavo_router.residency.usage import PyUsage

if TYPE_CHECKING:
    from octavo_router.proxy.stream_form import StreamForm
    from octavo_router.residency.api import FindEventEnd, SplitTokenLines, TokenLine

# Errors that an engine reports inside a stream because it is itself going or gone, or because it
# could not take all of a request in: another engine can go on. All other errors (deadline_exceeded,
# model_error, internal_error, …) are the request's own end; resuming would only repeat them, or
# carry what kills engines from one to the next.
ENGINE_DEAD = "engine_dead"
LOST_CODES = frozenset((ENGINE_DEAD, "server_shutdown", "draining", "loading", "queue_full"))
BAD_STREAM = "bad_stream"
MAX_ANSWERS = 65_536

# Inside JSON strings quotes are escaped, so these bytes can only be keys of ours.
_FINAL = b'"finish_reason":"'
_GOES_ON = b'"finish_reason":null'
_USAGE = b'"choices":[],"usage":'


class StreamMemory:
    """One client's stream, over all the engines that it takes to finish it."""

    __slots__ = (
        "_answers",
        "_begin",
        "_begun",
        "_cutter",
        "_finished",
        "_form",
        "_keeps_lines",
        "_kv_address",
        "_num_events",
        "_opened",
        "_pieces",
        "_saw_usage",
        "_split",
        "cached_tokens",
        "failed_with",
        "is_done",
        "is_untouched",
        "lost_with",
        "problem",
        "prompt_tokens",
        "wants_usage",
    )

    def __init__(
        self,
        split_token_lines: SplitTokenLines,
        find_event_end: FindEventEnd,
        *,
        form: StreamForm = CHUNKS,
        wants_usage: bool = True,
        max_event_bytes: int = MAX_EVENT_BYTES,
        keeps_lines: bool = False,
    ) -> None:
        """`keeps_lines`: what is relayed has our lines, for a client that may continue it."""
        self.wants_usage = wants_usage  # whether a usage chunk comes before [DONE], as far as known
        self._form = form
        self._keeps_lines = keeps_lines
        self._split = split_token_lines
        self._cutter = EventCutter(find_event_end, limit=max_event_bytes)
        self._begin: Resume | None = None  # without tokens
        self._begun = False  # by the engine that speaks now
        self._kv_address = ""  # of the last one that has begun
        self._answers: list[array[int]] = []  # four bytes a token
        self._opened: set[int] = set()
        self._finished: set[int] = set()
        self._saw_usage = False
        # Of a list of items:
        self._pieces = array("I")  # the tokens of each line that has some
        self._num_events = 0  # that the client has seen
        self.is_untouched = True  # the client has seen nothing
        self.is_done = False  # it has seen the end
        self.failed_with = ""  # code of an error that it has seen
        self.lost_with = ""  # code of an error that was held back, or BAD_STREAM: it is lost
        self.problem = ""  # for the log: what is wrong with a BAD_STREAM
        # As the present engine reported them; an older one does not.
        self.prompt_tokens = 0
        self.cached_tokens: int | None = None

    def feed(self, data: bytes) -> bytes:
        """What to relay of it: whole events, without the lines that are for us. Hot path.

        Look at `lost_with` afterwards; with BAD_STREAM the engine is not to be trusted either. What
        comes after the end, or after the loss, is dropped. What is remembered is what was relayed.
        """
        if self.is_done or self.lost_with:
            return b""
        try:
            whole = self._cutter.push(data)
            if not whole:
                return b""
            clean, lines, begin = self._split(whole)
            if begin is not None:
                if self._begun or not whole.startswith(BEGIN) or b"\n" + BEGIN in whole:
                    raise MalformedStream("the stream begins twice, or not with its beginning")
                self._take_begin(begin)
            if self._is_plain(clean, len(lines)) and self._fits(lines):
                self._take_lines(lines)
                shown = whole if self._keeps_lines else clean
            else:
                shown = clean = self._read_events(whole)
        except (MalformedStream, ValueError) as error:  # nothing of these bytes was taken in
            self._lose(str(error))
            return b""
        if clean:
            self.is_untouched = False
            if self._form.is_items:
                self._num_events += clean.count(b"\n\n")
        if begin is not None and self._keeps_lines:
            shown = _without_address(shown)
        return shown

    def forget_address(self) -> None:
        """Where the blocks are: a client said so."""
        self._kv_address = ""

    def start_over(self) -> None:
        """Another engine takes over: half an event of the one before is forgotten."""
        self._cutter.clear()
        self._begun = False
        self.lost_with = self.problem = ""
        if self.is_untouched:  # it may begin as another generation
            self._begin = None
            self._answers = []

    # ── what may be done after a loss ──

    @property
    def can_resume(self) -> bool:
        """Whether another engine has something left to say. It would repeat a usage chunk."""
        is_begun = self._begin is not None and not self.is_untouched
        return is_begun and not self.is_over and not self.missing

    @property
    def is_over(self) -> bool:
        return self.is_done or bool(self.failed_with)

    @property
    def missing(self) -> bytes:
        """The end, where nothing else is missing and no engine is needed for it; or nothing."""
        if self._form.is_items:  # whose end says again what was in them
            return b""
        answers = len(self._answers)
        ended = answers > 0 and len(self._finished) == answers
        counted = self._saw_usage or not self.wants_usage
        return DONE if ended and counted and not self.is_over else b""

    def resume_body(self, body: bytes) -> bytes:
        """The request that goes on, for the same path, with RESUME_HEADER: 1.

        `body` is what the first engine got. Only where `can_resume`.
        """
        begin = self._begin
        assert begin is not None  # can_resume
        resume = Resume(
            id=begin.id,
            created=begin.created,
            seed=begin.seed,
            tokens=[answer.tolist() for answer in self._answers],
            finished=sorted(self._finished),
            opened=sorted(self._opened),
            pieces=self._pieces.tolist(),
            events=self._num_events,
            kv_address=self._kv_address,
        )
        return pack(resume, body)

    # ── what there is to count ──

    @property
    def num_tokens(self) -> int:
        """Of all answers: what the client has of them. For usage and limits, also of a loss."""
        return sum(map(len, self._answers))

    @property
    def usage(self) -> PyUsage:
        """As far as the router knows it. What was found of an answer's own tokens is no prompt."""
        cached = self.cached_tokens
        if cached is not None:
            cached = min(cached, self.prompt_tokens)
        return PyUsage(self.prompt_tokens, self.num_tokens, cached)

    @property
    def num_answers(self) -> int:
        """Prompts times n; 0 before the first event."""
        return len(self._answers)

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def id(self) -> str:
        """Of the generation, the same on every engine that it passes; "" before the first event."""
        return "" if self._begin is None else self._begin.id

    # ── inside ──

    def _take_begin(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
            begin = Resume(fields["id"], fields["created"], fields["seed"], [])
            answers = fields["answers"]
            prompt_tokens, cached = fields.get("prompt_tokens", 0), fields.get("cached")
            kv_address = fields.get("kv_address", "")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise MalformedStream(f"the begin line cannot be read: {line[:80]!r}") from None
        counts = (answers, prompt_tokens, 0 if cached is None else cached)
        numbers = (begin.created, begin.seed, *counts)
        texts = (begin.id, kv_address)
        if not all(isinstance(text, str) for text in texts) or any(
            type(number) is not int for number in numbers
        ):
            raise MalformedStream(f"the begin line has values of the wrong type: {line[:80]!r}")
        if not all(0 <= count < 2**31 for count in counts):
            raise MalformedStream(f"the begin line has counts that cannot be: {line[:80]!r}")
        if self._begin is None:
            if not 1 <= answers <= MAX_ANSWERS:
                raise MalformedStream(f"the begin line promises {answers} answers")
            self._begin = begin
            self._answers = [array("I") for _ in range(answers)]
        elif begin != self._begin or answers != len(self._answers):
            raise MalformedStream("the stream that follows is of another generation")
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached
        self._kv_address = kv_address
        self._begun = True

    def _is_plain(self, clean: bytes, num_lines: int) -> bool:
        """Whether each event only brings text, and nothing has to be done about any of them."""
        form = self._form
        if self._begun:
            is_plain = num_lines == clean.count(b"\n\n")
            return is_plain and (form.is_items or num_lines == clean.count(_GOES_ON))
        marks = (*form.ends, *form.errors)
        return self._begin is None and _FINAL not in clean and not any(m in clean for m in marks)

    def _fits(self, lines: list[TokenLine]) -> bool:
        num_answers, finished = len(self._answers), self._finished
        for index, _ in lines:  # noqa: SIM110  # half the time of all()
            if index >= num_answers or index in finished:
                return False
        return True

    def _take_lines(self, lines: list[TokenLine]) -> None:
        for index, ids in lines:
            self._answers[index].extend(ids)
            self._opened.add(index)
            if ids and self._form.is_items:
                self._pieces.append(len(ids))

    def _read_events(self, whole: bytes) -> bytes:
        """One by one: some of them end an answer, or the stream, or are wrong.

        Our engines end each with two line feeds.
        """
        relayed: list[bytes] = []
        start = 0
        while start < len(whole) and not self.is_done and not self.lost_with:
            end = whole.find(b"\n\n", start)
            end = len(whole) if end < 0 else end + 2
            event, lines, _ = self._split(whole[start:end])
            written, start = whole[start:end], end
            problem = self._problem(event, lines)
            if problem:
                self._lose(problem)
            elif self._is_error(event) and (code := _code_of(event)) in LOST_CODES:
                self.lost_with = code
            else:
                self._take_event(event, lines)
                relayed.append(written if self._keeps_lines else event)
        return b"".join(relayed)

    def _take_event(self, event: bytes, lines: list[TokenLine]) -> None:
        self._take_lines(lines)
        if self._is_error(event):
            self.failed_with = self.failed_with or _code_of(event)
        elif event.startswith(self._form.ends):
            self.is_done = True
        elif self._form.is_items:
            return
        elif _USAGE in event:
            self._saw_usage = True
        elif _FINAL in event and lines:
            self._finished.add(lines[0][0])

    def _problem(self, event: bytes, lines: list[TokenLine]) -> str:
        """What is wrong with the event, as far as its form shows."""
        if self._begin is None and not lines:
            return ""  # an engine that reports no tokens; it cannot be resumed
        is_last = self._is_error(event) or event.startswith(self._form.ends)
        if not self._begun and not is_last:
            return "an event comes before the stream has begun"
        if not self._fits(lines):
            return f"answer {lines[0][0]} is mentioned, but has ended or was not requested"
        if len(lines) > 1:
            return "an event is of several answers"
        is_usage = _USAGE in event and not self._form.is_items
        # A response that failed is described once more after its error.
        if not lines and not (is_last or is_usage or self.failed_with):
            return "an event does not say of which answer it is"
        left = 0 if self._form.is_items else len(self._answers) - len(self._finished)
        if event == DONE and left and not self.failed_with:
            return f"the stream ends before {left} of its answers do"  # cut, and shown as whole
        return ""

    def _is_error(self, event: bytes) -> bool:
        return event.startswith(self._form.errors)

    def _lose(self, problem: str) -> None:
        self.lost_with = BAD_STREAM
        self.problem = problem


def _without_address(events: bytes) -> bytes:
    """A begin line at their head tells no client where engines listen."""
    line, separator, rest = events.partition(b"\n")
    if not line.startswith(BEGIN) or b'"kv_address"' not in line:
        return events
    fields = json.loads(line[len(BEGIN) :])
    del fields["kv_address"]
    return BEGIN + json.dumps(fields).encode() + separator + rest


def _code_of(event: bytes) -> str:
    try:
        error = json.loads(event.partition(b"data: ")[2])
        code = error.get("error", error)["code"]  # /v1/responses has it in the event itself
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "unreadable"
    return code if isinstance(code, str) else "unknown"
