"""From the core's tokens to what callers read: text, stop strings, log-probabilities, n answers.

Synchronous and free of effects: its caller sends the aborts that it asks for. Output piles
up in `TrackedRequest.pending` until taken: a slow reader gets fewer and larger pieces, and nothing
is queued twice.
"""

from __future__ import annotations

import logging
from bisect import insort
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo_engine.core.seeds import key
from octavo_engine.core.text.flat_logprobs import FlatLogprobs
from octavo_engine.core.text.logprobs import DecodedLogprobs, TokenChoice
from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
from octavo_engine.core.text.repetition import RepetitionWatch
from octavo_engine.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    RequestError,
)
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import RequestOutputKind
from octavo_engine.tokenization.detokenizer import Detokenizer
from octavo_engine.tokenization.stop_strings import StopStrings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.core.text.outputs import PromptLogprobs
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.state.adapter import AdapterRef
    from octavo_engine.state.audio import AudioWindow
    from octavo_engine.state.kv_source import KVSource
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.outputs import FinishReason, SequenceOutput, TokenLogprobs
    from octavo_engine.state.retention import KVRetention
    from octavo_engine.state.sampling_params import SamplingParams
    from octavo_engine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# What is settled or searched here, as the core has it, which knows sequences and tokens only.
_OURS: Mapping[str, object] = MappingProxyType(
    {
        "n": 1,
        "seed": None,
        "stop": (),
        "repetition_detection": None,
        "flat_logprobs": False,
        "output_kind": RequestOutputKind.DELTA,
        "stream_interval": None,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledSubmission:
    """A request that was validated and settled, ready to be cut into sequences."""

    request_id: str  # the caller's; need not be unique
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    resumed: Sequence[ResumedOutput] = ()  # one an answer, of a request that is resumed
    arrival_at: float = 0.0
    deadline_at: float | None = None
    priority: int = 0
    is_whole: bool = False  # nothing is read before its end
    cache_salt: str = ""
    adapter: AdapterRef | None = None
    media: PromptMedia | None = None
    audio: AudioWindow | None = None
    labels: Labels | None = None  # of the prompt's prefixes; see kv.residency
    group: str = ""  # the client's request, where it has several prompts; else empty
    can_move: bool = False  # a router goes on with it on another engine if this one ends it
    kv_source: KVSource | None = None  # the engine that computed its prompt, if one did
    retention: KVRetention | None = None  # of its KV blocks, after its end
    is_prefetch: bool = False  # nothing is computed: its blocks are brought from tiers


class SequenceText:
    """One of a request's n answers: its place in the text and the search for stop strings."""

    __slots__ = (
        "detokenizer",
        "finished",
        "first_at",
        "index",
        "num_chars",
        "num_tokens",
        "repetition",
        "request",
        "resumed_ids",
        "resumed_texts",
        "sequence_id",
        "stops",
    )

    def __init__(
        self, request: TrackedRequest, index: int, sequence_id: str, tokenizer: Tokenizer
    ) -> None:
        params = request.submission.params
        self.request = request
        self.index = index
        self.sequence_id = sequence_id
        self.num_tokens = 0
        self.resumed_ids: list[int] = []  # of a resumed answer
        self.resumed_texts: list[str] = []  # of those, a piece each
        self.num_chars = 0  # of all tokens' text; counted where log-probabilities are requested
        self.finished = False
        self.first_at = 0.0  # when its first token came
        self.detokenizer = (
            Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_ids=params.shown_special_ids,
                prompt_token_ids=request.submission.prompt_token_ids,
            )
            if params.detokenize
            else None
        )
        wanted = params.repetition_detection
        self.repetition = (
            RepetitionWatch(wanted) if wanted is not None and wanted.max_pattern_size else None
        )
        self.stops = (
            StopStrings(params.stop, include=params.include_stop_str_in_output)
            if params.stop
            else None
        )


class TrackedRequest:
    """A caller's request while it is in flight, and the output that was not read yet."""

    __slots__ = (
        "answers",
        "error",
        "first",
        "pending",
        "prompt_logprobs",
        "submission",
        "unfinished",
    )

    def __init__(self, submission: SettledSubmission) -> None:
        self.submission = submission
        self.answers: list[SequenceText] = []
        self.first = 0  # the answer that speaks for the prompt
        self.unfinished = submission.params.n
        self.pending: RequestOutput | None = None
        self.error: RequestError | None = None  # raised to the reader once `pending` is read
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def finished(self) -> bool:
        return self.unfinished == 0

    @property
    def has_begun(self) -> bool:
        return any(answer.first_at for answer in self.answers)

    def take(self) -> RequestOutput | None:
        """The output since the last call."""
        output, self.pending = self.pending, None
        return output

    def unread(self) -> RequestOutput:
        """The unread output, to be added to."""
        if self.pending is None:
            given = self.submission
            self.pending = RequestOutput(given.request_id, given.prompt, given.prompt_token_ids)
        return self.pending

    def unread_of(self, answer: SequenceText) -> CompletionOutput:
        outputs = self.unread().outputs
        for output in outputs:
            if output.index == answer.index:
                return output
        new = CompletionOutput(answer.index, resumed_texts=answer.resumed_texts)
        if not outputs:
            outputs.append(new)
            return new
        insort(outputs, new, key=lambda output: output.index)
        return new


@dataclass(slots=True)
class Processed:
    """Whom a step concerns."""

    # Those with new output; one may stand here twice.
    touched: list[TrackedRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)  # sequences the core must stop


class _Added(NamedTuple):
    """What became of an answer's new tokens."""

    kept: int  # so many of them count
    stop: str | None  # the stop string that was met
    offsets: Iterable[int]  # where in the answer's text each begins; zeros where nobody asks


class OutputProcessor:
    """All requests in flight, by the ids of their sequences in the core."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, SequenceText] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        """Sequences in flight."""
        return len(self._answers)

    def add(self, submission: SettledSubmission) -> tuple[TrackedRequest, list[EngineRequest]]:
        """The request and its sequences for the core; none if it resumes what was complete."""
        number = next(self._numbers)
        if submission.params.n > 1 and not submission.group:
            submission = replace(submission, group=f"n{number}")
        request = TrackedRequest(submission)
        for index in range(submission.params.n):
            answer = SequenceText(request, index, f"{number}.{index}", self._tokenizer)
            request.answers.append(answer)
            if not submission.resumed or not self._resume(answer, submission.resumed[index]):
                self._answers[answer.sequence_id] = answer
        running = [answer for answer in request.answers if not answer.finished]
        if running:  # an answer that has said nothing yet may still have to speak of the prompt
            request.first = next((a for a in running if not a.resumed_ids), running[0]).index
        return request, [self._sequence(answer) for answer in running]

    @property
    def sequence_ids(self) -> list[str]:
        """Of all sequences in flight."""
        return list(self._answers)

    def process(self, outputs: Iterable[SequenceOutput], *, now: float = 0.0) -> Processed:
        """Hot path: once per sequence and step. Unknown ids are late output of what was aborted.

        What cannot be processed ends its own request.
        """
        done = Processed()
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            request = answer.request
            try:
                self._advance(answer, output, now)
            except Exception as error:  # above here it would be the loss of all requests
                logger.exception("Could not read an output", extra={"sequence": output.request_id})
                problem = f"the engine could not read its output: {type(error).__name__}"
                request.error = GenerationFailed(problem)
            if answer.finished:
                del self._answers[output.request_id]
                if output.finish_reason is None:  # a stop string: the core does not know yet
                    done.aborts.append(output.request_id)
            if request.error is not None:
                done.aborts += self._drop(request)
            if request.pending is not None or request.error is not None:
                done.touched.append(request)
        return done

    def refuse(self, sequence_id: str, error: RequestError) -> Processed:
        """The core did not take this sequence; its request is over, the other answers with it."""
        answer = self._answers.get(sequence_id)
        if answer is None:
            return Processed()
        answer.request.error = error
        aborts = [other for other in self._drop(answer.request) if other != sequence_id]
        return Processed([answer.request], aborts)

    def abort(self, request: TrackedRequest) -> list[str]:
        """End it here and now, with what it has; the sequences to stop in the core."""
        for answer in request.answers:
            if not answer.finished:
                self._finish(answer, request.unread_of(answer), "abort")
        return self._drop(request)

    def lose_all(self, error: RequestError) -> list[TrackedRequest]:
        """The core is gone and all that was in flight with it."""
        lost = self._requests()
        for request in lost:
            request.error = copy(error)  # each is raised on its own
            self._drop(request)
        return lost

    def move_out(self, error: RequestError) -> tuple[list[TrackedRequest], list[str]]:
        """End what has begun and may go on on another engine; and the sequences that still ran."""
        moved = [one for one in self._requests() if one.submission.can_move and one.has_begun]
        dropped: list[str] = []
        for request in moved:
            request.error = copy(error)
            dropped += self._drop(request)
        return moved, dropped

    def _requests(self) -> list[TrackedRequest]:
        return list({id(a.request): a.request for a in self._answers.values()}.values())

    # ── one answer ──

    def _advance(self, answer: SequenceText, output: SequenceOutput, now: float) -> None:
        request = answer.request
        if answer.index == request.first:
            self._note_prompt(request, output)
        if output.finish_reason in ("error", "deadline"):
            request.error = _failure(output)
            return
        ids = output.token_ids
        if not ids and output.finish_reason is None:
            return
        new = request.unread_of(answer)
        if not answer.first_at:
            answer.first_at = now
        new.first_at, new.last_at = answer.first_at, now
        repeated = None if answer.repetition is None else answer.repetition.cut(ids)
        if repeated is not None:
            ids = ids[:repeated]
        shown = len(ids)  # the text of the token that ends an answer is not part of it
        params = request.submission.params
        ends_in_text = output.is_whole or params.include_stop_str_in_output
        if output.finish_reason == "stop" and repeated is None and not ends_in_text:
            shown -= 1
        kept, stop, offsets = self._add_text(answer, new, ids, shown)
        new.token_ids += ids[:kept]
        new.num_tokens = answer.num_tokens
        if params.logprobs is not None:
            if new.logprobs is None:
                new.logprobs = FlatLogprobs() if params.flat_logprobs else []
            is_ranked = not params.logprob_token_ids
            for entry, offset in zip(output.logprobs[:kept], offsets, strict=False):
                new.logprobs.append(self._decode(entry, params.logprobs, offset, is_ranked))
        if stop is not None:
            self._finish(answer, new, "stop", stop)
        elif repeated is not None:
            self._finish(answer, new, "repetition")
        elif output.finish_reason is not None:
            self._finish(answer, new, output.finish_reason, output.stop_token_id)

    def _add_text(
        self, answer: SequenceText, new: CompletionOutput, ids: list[int], shown: int
    ) -> _Added:
        """Hot path: all at once where nobody asks what each token adds."""
        detokenizer, stops = answer.detokenizer, answer.stops
        params = answer.request.submission.params
        if detokenizer is None or (stops is None and params.logprobs is None):
            answer.num_tokens += len(ids)
            if detokenizer is not None and shown > 0:
                new.text += detokenizer.push(ids if shown == len(ids) else ids[:shown])
            return _Added(len(ids), None, repeat(0))
        offsets: list[int] = []
        for position, token in enumerate(ids):
            answer.num_tokens += 1
            offsets.append(answer.num_chars)
            if position >= shown:
                continue
            text = detokenizer.push([token])
            answer.num_chars += len(text)
            if stops is None or answer.num_tokens <= params.min_tokens:  # too early to stop
                new.text += text
                continue
            safe, stop = stops.push(text)
            new.text += safe
            if stop is not None:
                return _Added(position + 1, stop, offsets)
        return _Added(len(ids), None, offsets)

    def _finish(
        self,
        answer: SequenceText,
        new: CompletionOutput,
        reason: FinishReason,
        stop: str | int | None = None,
    ) -> None:
        """The held-back text comes out, unless a stop string was in it."""
        if not isinstance(stop, str) and answer.detokenizer is not None:
            tail = answer.detokenizer.flush()
            if answer.stops is None:
                new.text += tail
            elif reason == "abort":  # half a character might have become another one: no match
                new.text += answer.stops.flush() + tail
            else:
                safe, met = answer.stops.push(tail)
                new.text += safe
                if met is not None:
                    reason, stop = "stop", met
                else:
                    new.text += answer.stops.flush()
        new.finish_reason, new.stop_reason = reason, stop
        new.num_tokens = answer.num_tokens
        new.sequence_id = answer.sequence_id
        answer.finished = True
        request = answer.request
        request.unfinished -= 1
        request.unread().finished = request.finished

    def _resume(self, answer: SequenceText, resumed: ResumedOutput) -> bool:
        """Replay what another engine has sent already; true if the answer was complete with it.

        The text that comes out was seen by the caller, so it is dropped. What detokeniser and stop
        search hold back was not: it comes out with the first new token, as it would have there.
        """
        request, ids = answer.request, resumed.token_ids
        if resumed.ended:
            answer.num_tokens = len(ids)
            answer.finished = True
            request.unfinished -= 1
            if request.finished:
                request.unread().finished = True
            return True
        if not ids:
            return False
        submission = request.submission
        params = submission.params
        ends_text = () if params.ignore_eos else submission.eos_token_ids
        is_end = ids[-1] in ends_text or ids[-1] in params.stop_token_ids
        complete = is_end and len(ids) >= params.min_tokens
        shown = len(ids) - (complete and not params.include_stop_str_in_output)
        kept, met = self._replay(answer, resumed, shown)
        reason: FinishReason = "stop"
        stop: str | int | None = met
        if met is None and complete:
            stop = None if ids[-1] in ends_text else ids[-1]
        elif met is None:
            if answer.repetition is not None and answer.repetition.cut(ids) is not None:
                reason = "repetition"
            elif params.max_tokens is None or kept < params.max_tokens:
                return False
            else:
                reason = "length"
        self._finish(answer, request.unread_of(answer), reason, stop)
        return True

    def _replay(
        self, answer: SequenceText, resumed: ResumedOutput, shown: int
    ) -> tuple[int, str | None]:
        """How many of the tokens count, and the stop string that was met."""
        ids, kept = resumed.token_ids, 0
        met = None
        answer.resumed_ids = ids
        for length in resumed.pieces or (len(ids),):
            new = CompletionOutput(answer.index)
            piece = ids[kept : kept + length]
            added = self._add_text(answer, new, piece, max(0, min(length, shown - kept)))
            answer.resumed_texts.append(new.text)
            kept, met = kept + added.kept, added.stop
            if met is not None:
                break
        return kept, met

    def _sequence(self, answer: SequenceText) -> EngineRequest:
        submission = answer.request.submission
        is_first = answer.index == answer.request.first
        changes: dict[str, object] = {
            name: value
            for name, value in _OURS.items()
            if getattr(submission.params, name) != value
        }
        if not is_first and submission.params.prompt_logprobs is not None:
            changes["prompt_logprobs"] = None
        return EngineRequest(
            request_id=answer.sequence_id,
            prompt_token_ids=submission.prompt_token_ids,
            params=msgspec.structs.replace(submission.params, **changes)
            if changes
            else submission.params,
            output_token_ids=answer.resumed_ids,
            eos_token_ids=submission.eos_token_ids,
            seed=key(submission.seed, answer.index),
            arrival_at=submission.arrival_at,
            deadline_at=submission.deadline_at,
            priority=submission.priority,
            is_whole=submission.is_whole,
            cache_salt=submission.cache_salt,
            adapter=submission.adapter,
            media=() if submission.media is None else submission.media.spans,
            media_items=() if submission.media is None else submission.media.items,
            audio=submission.audio,
            labels=submission.labels,
            group=submission.group,
            kv_source=submission.kv_source,
            retention=submission.retention,
            is_prefetch=submission.is_prefetch,
        )

    def _drop(self, request: TrackedRequest) -> list[str]:
        """Forget a request; the sequences that still ran."""
        dropped = [a.sequence_id for a in request.answers if a.sequence_id in self._answers]
        for sequence_id in dropped:
            del self._answers[sequence_id]
        request.unfinished = 0
        return dropped

    # ── log-probabilities ──

    def _note_prompt(self, request: TrackedRequest, output: SequenceOutput) -> None:
        """Cached tokens, wait, and log-probabilities of the prompt, which arrive chunk by chunk."""
        if output.num_cached_tokens:  # in the first output, with or without a token
            request.unread().num_cached_tokens = output.num_cached_tokens
        if output.queued_s is not None:
            request.unread().queued_s = output.queued_s
        request.prompt_logprobs += output.prompt_logprobs
        wanted = request.submission.params.prompt_logprobs
        if wanted is None or not (output.token_ids or output.finish_reason):
            return
        first = request.answers[request.first]
        if first.num_tokens == len(first.resumed_ids):
            flat = request.submission.params.flat_logprobs
            decoded: PromptLogprobs = FlatLogprobs() if flat else []
            decoded.append(None)
            decoded.extend(self._decode(entry, wanted) for entry in request.prompt_logprobs)
            request.unread().prompt_logprobs = decoded
            request.prompt_logprobs = []

    def _decode(
        self, entry: TokenLogprobs, alternatives: int, offset: int = 0, is_ranked: bool = True
    ) -> DecodedLogprobs:
        text, raw = self._tokenizer.token_text, self._tokenizer.token_bytes
        top = [
            TokenChoice(token, text(token), raw(token), logprob, rank if is_ranked else None)
            for rank, (token, logprob) in enumerate(
                zip(entry.top_ids[:alternatives], entry.top_logprobs, strict=False), start=1
            )
        ]
        token = entry.token_id
        return DecodedLogprobs(
            token, text(token), raw(token), entry.logprob, entry.rank, top, offset, entry.attention
        )


def _failure(output: SequenceOutput) -> RequestError:
    if output.finish_reason == "deadline":
        return DeadlineExceeded("the request's deadline passed before it was done")
    if output.is_refused:
        return InvalidRequest(output.error or "the request allows no token")
    return GenerationFailed(output.error or "the engine could not compute this request")
