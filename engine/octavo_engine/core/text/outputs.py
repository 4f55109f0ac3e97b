"""What a caller gets back: one RequestOutput for each new output, or one with all at the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from octavo_engine.core.text.flat_logprobs import FlatLogprobs
    from octavo_engine.core.text.logprobs import DecodedLogprobs
    from octavo_engine.state.outputs import FinishReason


PromptLogprobs: TypeAlias = "list[DecodedLogprobs | None] | FlatLogprobs[DecodedLogprobs | None]"


@dataclass(slots=True)
class CompletionOutput:
    """One answer: its text, tokens and logprobs, what is new or all, see RequestOutput."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # One a token; None unless requested.
    logprobs: list[DecodedLogprobs] | FlatLogprobs[DecodedLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop id; None for end of text
    num_tokens: int = 0  # generated so far in all, resumed ones included
    # What came before all this, from the engine that an answer was resumed from; in the pieces that
    # it was resumed with.
    resumed_texts: list[str] = field(default_factory=list, compare=False)
    # What the core called it, known once it is finished; no part of what was said.
    sequence_id: str = field(default="", compare=False)
    # When its first token and the newest one came from the core, by time.monotonic; 0: unknown.
    first_at: float = field(default=0.0, compare=False)
    last_at: float = field(default=0.0, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """Output of one request. From LLM it carries all, from AsyncEngine what is new since the last
    unless `output_kind` says otherwise.

    `outputs` holds only the answers that there is something of, in the order of their index.
    """

    request_id: str
    prompt: str | None  # None when it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens that were not computed again
    queued_s: float | None = None  # wait before the first step, of the first answer
    # One entry a prompt token, None for the first; whole in the output that brings the first token.
    prompt_logprobs: PromptLogprobs | None = None

    def absorb(self, later: RequestOutput) -> None:
        """Take in what came later, so that two outputs read as one."""
        known = {output.index: output for output in self.outputs}
        for new in later.outputs:
            old = known.get(new.index)
            if old is None:
                self.outputs.append(new)
                continue
            old.text += new.text
            old.token_ids += new.token_ids
            if old.logprobs is None:
                old.logprobs = new.logprobs
            elif new.logprobs is not None:
                old.logprobs.extend(new.logprobs)
            old.finish_reason = new.finish_reason
            old.stop_reason = new.stop_reason
            old.num_tokens = new.num_tokens
            old.sequence_id = new.sequence_id
            old.last_at = new.last_at
        self.outputs.sort(key=lambda output: output.index)
        self.finished = later.finished
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        if later.queued_s is not None:
            self.queued_s = later.queued_s
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs

    def copy(self) -> RequestOutput:
        """What stays as it is when this one absorbs more."""
        outputs = [
            replace(
                output,
                token_ids=output.token_ids[:],
                logprobs=None if output.logprobs is None else output.logprobs[:],
            )
            for output in self.outputs
        ]
        return replace(self, outputs=outputs)
