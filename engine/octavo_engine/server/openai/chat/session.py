"""A chat while it runs, in no protocol's shape: what each answer adds, as it comes.

Every protocol that serves chats uses this: `prepare_chat` of chat.prepare, then `run`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_engine.core.text.outputs import CompletionOutput
from octavo_engine.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from octavo_engine.errors import RequestError
from octavo_engine.server.generation.reasoning_tokens import ReasoningTokens
from octavo_engine.server.generation.run import run_job
from octavo_engine.server.generation.structured import name_field
from octavo_engine.server.generation.usage import Usage
from octavo_engine.tokenization.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.text.logprobs import DecodedLogprobs
    from octavo_engine.core.text.output_stream import OutputSink
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.server.generation.job import JobOutput
    from octavo_engine.server.openai.chat.prepare import PreparedChat
    from octavo_engine.server.service import Service

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS, _SHORT_ID_CHARS = 24, 9


@dataclass(frozen=True, slots=True)
class ChatToken:
    """Stands among the events before what this token says, however many tokens come at once."""

    entry: DecodedLogprobs


@dataclass(slots=True)
class CallDelta:
    """New output of one tool call. Name and id come with its first delta."""

    index: int  # among the answer's calls
    name: str = ""
    id: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ChoiceDelta:
    """New output of one answer since the last delta."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    # The same in the order in which it was said, with the tokens where logprobs are requested;
    # empty where the text is the content as it comes.
    events: list[Event | ChatToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[DecodedLogprobs] | None = None  # one a token, where requested
    finish_reason: str | None = None  # the engine's, or tool_calls
    stop_reason: str | int | None = None
    num_tokens: int = 0  # of the whole answer so far
    reasoning_tokens: int = 0  # of those

    @property
    def says_something(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.finish_reason)


@dataclass(slots=True)
class ChatDelta:
    """New output of a request. The first one describes the prompt."""

    choices: list[ChoiceDelta]
    finished: bool
    output: RequestOutput  # of the engine, with all that is said of the prompt
    # What the client of a stream that is resumed in pieces has got before, as it came then.
    replayed: list[ChoiceDelta] = field(default_factory=list)


def client_reason(prepared: PreparedChat, reason: str | None) -> str | None:
    """Why an answer ended, in the words of the chat endpoint's clients."""
    return "function_call" if reason == "tool_calls" and prepared.has_functions else reason


class ChatSession:
    """One request's. `usage` is exact after each delta."""

    def __init__(self, service: Service, prepared: PreparedChat) -> None:
        self.usage = Usage(prepared.job)
        self._service = service
        self._prepared = prepared
        self._answers: dict[int, _Answer] = {}
        self._has_replayed = not any(one.pieces for one in prepared.job.resumed)
        # A resumed answer numbers its calls as it did before; they are unlike all others.
        seed = prepared.job.seed
        self._secret = secrets.token_hex(16) if seed is None else f"{prepared.created} {seed}"
        if prepared.reading.reasoning is not None:
            for index, resumed in enumerate(prepared.job.resumed):
                self._account(index, resumed)

    async def run(self, sink: OutputSink[ChatDelta], *, stream: bool) -> None:
        """To the end of all answers, whose deltas go to `sink`; with `stream` false there are one
        or a few. Cancelling it aborts the request. Raises RequestError."""
        job = self._prepared.job
        try:
            await run_job(self._service, job, sink.after(self._delta), stream=stream)
        except RequestError as error:
            name_field(error, self._prepared.request)
            raise

    def call_id(self, choice: int, call: int) -> str:
        """`call_` and 24 letters; nine letters for models that take no other ids."""
        prepared = self._prepared
        material = f"{self._secret} {prepared.id} {choice} {call}".encode()
        number = int.from_bytes(hashlib.blake2b(material, digest_size=24).digest())
        letters: list[str] = []
        short = prepared.reading.short_ids
        for _ in range(_SHORT_ID_CHARS if short else _ID_CHARS):
            number, letter = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[letter])
        return "".join(letters) if short else "call_" + "".join(letters)

    def _account(self, index: int, resumed: ResumedOutput) -> None:
        """Thoughts of answers that began elsewhere count from the first sum on, be it that their
        turn is yet to come or that they have ended."""
        job = self._prepared.job
        detokenizer = Detokenizer(
            self._service.engine.tokenizer,
            skip_special_tokens=job.params.skip_special_tokens,
            shown_special_ids=job.params.shown_special_ids,
            prompt_token_ids=job.prompts[0],
        )
        answer = _Answer(self, self._prepared, self._service, index)
        ids = resumed.token_ids
        answer.replay(detokenizer.push(ids), ids, ended=resumed.ended)
        if answer.tokens is not None:
            self.usage.note_reasoning(index, answer.tokens.count)

    def _delta(self, result: JobOutput) -> ChatDelta:
        output = result.output
        self.usage.add(0, output)
        replayed = [] if self._has_replayed else self._replay(output)
        choices = [self._read(new) for new in output.outputs]
        return ChatDelta(choices, output.finished, output, replayed)

    def _replay(self, output: RequestOutput) -> list[ChoiceDelta]:
        """The deltas that its client has got, read again in the same pieces. If they were all, the
        last of them and what ends the answer are one: that is taken out of `output`."""
        self._has_replayed = True
        (resumed,), (new,) = self._prepared.job.resumed, output.outputs
        parts: list[CompletionOutput] = []
        end = 0
        for text, length in zip(new.resumed_texts, resumed.pieces, strict=True):
            ids = resumed.token_ids[end : end + length]
            end += length
            parts.append(CompletionOutput(new.index, text, ids, num_tokens=end))
        if new.finished and not new.token_ids:
            last = parts.pop()
            new.text, new.token_ids = last.text + new.text, last.token_ids
            parts.append(new)
            output.outputs = []
        return [self._read(one) for one in parts]

    def _read(self, new: CompletionOutput) -> ChoiceDelta:
        """Hot path: once per answer and delta."""
        choice = ChoiceDelta(
            new.index,
            token_ids=new.token_ids,
            logprobs=new.logprobs,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            num_tokens=new.num_tokens,
        )
        if self._prepared.reading.is_plain:
            choice.content = new.text
            if new.logprobs is not None:
                choice.events = [*map(ChatToken, new.logprobs), Content(new.text)]
            return choice
        answer = self._answers.get(new.index)
        if answer is None:
            answer = self._answers[new.index] = self._begin(new)
        answer.read(new, choice)
        if answer.tokens is not None:
            choice.reasoning_tokens = answer.tokens.count
            self.usage.note_reasoning(new.index, answer.tokens.count)
        return choice

    def _begin(self, new: CompletionOutput) -> _Answer:
        answer, resumed = (
            _Answer(self, self._prepared, self._service, new.index),
            self._prepared.job.resumed,
        )
        if resumed and not resumed[new.index].pieces:
            # Its tokens count, even if all their text was held back.
            answer.replay("".join(new.resumed_texts), resumed[new.index].token_ids)
        return answer


class _Answer:
    """One answer's parser, and what is known of it so far."""

    def __init__(
        self, run: ChatSession, prepared: PreparedChat, service: Service, index: int
    ) -> None:
        reading = prepared.reading
        self._run = run
        self._reading = reading
        self._index = index
        self._parser = reading.parser()
        self._has_calls = False
        self._num_chars = 0  # read by the parser
        self._unsaid: deque[DecodedLogprobs] = deque()  # tokens whose text has not come
        self.tokens: ReasoningTokens | None = None
        if self._parser.reasoning is not None:
            tokenizer = service.engine.tokenizer
            hidden: frozenset[int] = frozenset()
            if prepared.job.params.skip_special_tokens:
                hidden = tokenizer.special_ids.difference(reading.shown_ids)
            self.tokens = ReasoningTokens(tokenizer, hidden)

    def replay(self, text: str, ids: list[int], *, ended: bool = False) -> None:
        """What its client already has."""
        events = self._parser.push(text)
        if ended:  # what was undecided is decided
            events += self._parser.finish()
        self._has_calls = any(isinstance(event, CallBegun) for event in events)
        self._num_chars = len(text)
        self._count(ids, text)

    def read(self, new: CompletionOutput, choice: ChoiceDelta) -> None:
        if new.logprobs is not None:
            self._read_tokens(new.text, new.logprobs, choice)
        elif new.text:
            self._push(new.text, choice)
        if new.finish_reason is not None:
            for event in self._parser.finish():
                self._tell(event, choice)
            choice.events += map(ChatToken, self._unsaid)
        self._count(new.token_ids, new.text)
        if new.finish_reason == "stop" and self._has_calls and self._reading.ends_with_calls:
            choice.finish_reason = "tool_calls"

    def _push(self, text: str, choice: ChoiceDelta) -> None:
        for event in self._parser.push(text):
            self._tell(event, choice)

    def _read_tokens(
        self, text: str, entries: Sequence[DecodedLogprobs], choice: ChoiceDelta
    ) -> None:
        """Each token's text by itself: which of them belong to reasoning or a call must not depend
        on how many came at once."""
        unsaid = self._unsaid
        unsaid += entries
        while text:
            while unsaid and unsaid[0].offset <= self._num_chars:
                choice.events.append(ChatToken(unsaid.popleft()))
            length = unsaid[0].offset - self._num_chars if unsaid else len(text)
            said, text = text[:length], text[length:]
            self._num_chars += len(said)
            self._push(said, choice)

    def _count(self, ids: list[int], text: str) -> None:
        if self.tokens is not None and self._parser.reasoning is not None:
            self.tokens.add(ids, text, self._parser.reasoning)

    def _tell(self, event: Event, choice: ChoiceDelta) -> None:
        match event:
            case Content(text=text):
                choice.content += text
                choice.events.append(event)
            case Reasoning(text=text):
                if self._reading.shows_reasoning:
                    choice.reasoning += text
                    choice.events.append(event)
            case CallBegun(index=index, name=name, id=id):
                self._has_calls = True
                if self._is_wanted(index):
                    id = id or self._run.call_id(self._index, index)
                    choice.calls.append(CallDelta(index, name, id))
                    choice.events.append(CallBegun(index, name, id))
            case Arguments(index=index, text=text):
                if not self._is_wanted(index):
                    return
                choice.events.append(event)
                if not choice.calls or choice.calls[-1].index != index:
                    choice.calls.append(CallDelta(index))
                choice.calls[-1].arguments += text

    def _is_wanted(self, index: int) -> bool:
        return index == 0 or self._reading.offer.parallel
