"""What a step yields as frames that the socket takes: one, and where that would be too large
several; what fits in none fails for itself alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo_engine.core.process import wire
from octavo_engine.state.outputs import SequenceOutput, StepOutput
from octavo_engine.state.pooling import PoolingOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.state.outputs import TokenLogprobs

_PARTS = 8  # a frame is filled to so small a part of the limit: pongs wait behind it

_encoder = msgspec.msgpack.Encoder()


class Frames(NamedTuple):
    """A message as it goes over the socket."""

    frames: list[bytes]
    failed: list[str]  # sequences whose output is an error now: what they still compute is not read


def frames_of(message: wire.FromCore) -> Frames:
    """Raises WireError for any message but a step's that is too large."""
    try:
        return Frames([wire.encode(message)], [])
    except wire.WireError:
        if not isinstance(message, wire.Outputs):
            raise
        return _split(message.step)


def _split(step: StepOutput) -> Frames:
    frames: list[bytes] = []
    failed: list[str] = []
    part = StepOutput()
    num_bytes = 0
    target = wire.MAX_FRAME // _PARTS
    for output in _pieces(step, target):
        size = len(_encoder.encode(output))
        if size > wire.MAX_FRAME - wire.ENVELOPE:
            if isinstance(output, SequenceOutput):
                failed.append(output.request_id)
            output = _too_large(output, size)
            size = 0
        if num_bytes and num_bytes + size > target:
            frames.append(wire.encode(wire.Outputs(part)))
            part, num_bytes = StepOutput(), 0
        if isinstance(output, SequenceOutput):
            part.outputs.append(output)
        else:
            part.pooled.append(output)
        num_bytes += size
    frames.append(wire.encode(wire.Outputs(part)))
    rest = msgspec.structs.replace(step, outputs=[], pooled=[])
    frames.append(wire.encode(wire.Outputs(rest)))
    return Frames(frames, failed)


def _pieces(step: StepOutput, target: int) -> Iterator[SequenceOutput | PoolingOutput]:
    yield from step.pooled
    for output in step.outputs:
        if len(_encoder.encode(output)) <= target:
            yield output
        else:
            yield from _pieces_of(output, target)


def _pieces_of(output: SequenceOutput, target: int) -> Iterator[SequenceOutput]:
    """The same output in several: first the prompt's rows, some at a time, then token by token."""
    for rows in _portions(output.prompt_logprobs, target):
        yield SequenceOutput(request_id=output.request_id, prompt_logprobs=rows)
    output = msgspec.structs.replace(output, prompt_logprobs=[])
    if len(output.logprobs) == len(output.token_ids):
        while len(output.token_ids) > 1:
            yield SequenceOutput(
                request_id=output.request_id,
                token_ids=output.token_ids[:1],
                logprobs=output.logprobs[:1],
            )
            output = msgspec.structs.replace(
                output, token_ids=output.token_ids[1:], logprobs=output.logprobs[1:]
            )
    yield output


def _portions(rows: list[TokenLogprobs], target: int) -> Iterator[list[TokenLogprobs]]:
    portion: list[TokenLogprobs] = []
    num_bytes = 0
    for row in rows:
        size = len(_encoder.encode(row))
        if portion and num_bytes + size > target:
            yield portion
            portion, num_bytes = [], 0
        portion.append(row)
        num_bytes += size
    if portion:
        yield portion


def _too_large(output: SequenceOutput | PoolingOutput, size: int) -> SequenceOutput | PoolingOutput:
    """In its place, the error."""
    message = f"the answer to one step takes {size} bytes, above the limit of {wire.MAX_FRAME}"
    if isinstance(output, PoolingOutput):
        return PoolingOutput(request_id=output.request_id, error=message)
    return SequenceOutput(
        request_id=output.request_id,
        finish_reason="error",
        error=f"{message}; ask for fewer log-probabilities",
        is_refused=True,
    )
