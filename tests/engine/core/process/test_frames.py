"""However much a step yields, all of it arrives; what no frame holds fails for itself alone.

Red when: a step's news is refused as a whole, an order changes, or a row gets lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo_engine.core.process import wire
from octavo_engine.core.process.frames import frames_of
from octavo_engine.core.text.output_processor import OutputProcessor, SettledSubmission
from octavo_engine.state.labels import ResidencyChange
from octavo_engine.state.outputs import EngineStats, SequenceOutput, StepOutput, TokenLogprobs
from octavo_engine.state.pooling import PoolingOutput
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from octavo_engine.core.text.outputs import RequestOutput


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 16_000)


def row(token: int, width: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, list(range(width)), [-0.5] * width)


def steps_of(frames: list[bytes]) -> list[StepOutput]:
    reader: wire.MessageReader[wire.FromCore] = wire.MessageReader(wire.FROM_CORE)
    steps = []
    for message in reader.feed(b"".join(frames)):
        assert isinstance(message, wire.Outputs)
        steps.append(message.step)
    return steps


def test_a_step_that_one_frame_does_not_hold_arrives_whole_in_several() -> None:
    outputs = [
        SequenceOutput(request_id=f"{i}", token_ids=[i], logprobs=[row(i, 100)]) for i in range(40)
    ]
    step = StepOutput(
        outputs=outputs,
        stats=EngineStats(steps=7),
        residency=ResidencyChange(bytes(12)),
        pooled=[PoolingOutput(request_id=f"p{i}", data=bytes(1500)) for i in range(30)],
    )
    frames, failed = frames_of(wire.Outputs(step))
    assert len(frames) > 5 and not failed
    steps = steps_of(frames)
    assert [o for s in steps for o in s.outputs] == outputs
    assert [o for s in steps for o in s.pooled] == step.pooled
    assert [s.stats for s in steps if s.stats] == [step.stats]
    assert [s.residency for s in steps if s.residency] == [step.residency]


def test_rows_of_one_sequence_are_split_and_read_as_if_they_had_come_at_once() -> None:
    output = SequenceOutput(
        request_id="1.0",
        token_ids=[65, 66, 67],
        finish_reason="length",
        num_cached_tokens=2,
        logprobs=[row(65 + i, 200) for i in range(3)],
        prompt_logprobs=[row(i, 200) for i in range(19)],
    )
    frames, failed = frames_of(wire.Outputs(StepOutput(outputs=[output])))
    assert len(frames) > 5 and not failed
    news = []
    for steps in ([StepOutput(outputs=[output])], steps_of(frames)):
        processor = OutputProcessor(ByteTokenizer())
        params = SamplingParams(max_tokens=3, logprobs=200, prompt_logprobs=200)
        request, _ = processor.add(
            SettledSubmission(
                request_id="r", prompt=None, prompt_token_ids=[1] * 20, params=params, seed=0
            )
        )
        for step in steps:
            processor.process(step.outputs)
        taken: RequestOutput | None = request.take()
        assert taken is not None and taken.finished and len(taken.prompt_logprobs or ()) == 20
        news.append(taken)
    assert news[0] == news[1]


def test_what_no_frame_holds_fails_alone() -> None:
    wide = SequenceOutput(request_id="wide", token_ids=[1], logprobs=[row(1, 5000)])
    plain = SequenceOutput(request_id="plain", token_ids=[2])
    vectors = PoolingOutput(request_id="vectors", data=bytes(20_000))
    frames, failed = frames_of(wire.Outputs(StepOutput(outputs=[wide, plain], pooled=[vectors])))
    assert failed == ["wide"]
    outputs = [o for s in steps_of(frames) for o in s.outputs]
    assert [o.request_id for o in outputs] == ["wide", "plain"]
    assert outputs[0].finish_reason == "error"
    assert "ask for fewer log-probabilities" in (outputs[0].error or "")
    assert outputs[1] == plain
    (pooled,) = [o for s in steps_of(frames) for o in s.pooled]
    assert "above the limit of 16000" in (pooled.error or "")


def test_no_other_message_is_split() -> None:
    with pytest.raises(wire.WireError):
        frames_of(wire.Fatal("ModelError", "x" * 20_000))
