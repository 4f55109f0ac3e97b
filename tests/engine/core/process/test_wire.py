"""Frames survive any cut; what is no frame of ours is refused, never obeyed and never a crash."""

import struct
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine import errors
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.info import ModelInfo
from octavo_engine.core.process import wire
from octavo_engine.state.labels import Labels, ResidencyChange
from octavo_engine.state.outputs import EngineStats, SequenceOutput, StepOutput, TokenLogprobs
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

CONFIG = EngineConfig(
    model="/m",
    served_model_names=("a", "b"),
    device="sim",
    max_model_len=77,
    scheduler=SchedulerConfig(policy="priority", max_num_seqs=3),
    sim=SimConfig(kv_blocks=5),
)
REQUEST = EngineRequest(
    request_id="1.0",
    prompt_token_ids=[1, 2, 3],
    params=SamplingParams(seed=-5, stop_token_ids=(7,), logit_bias={3: float("-inf")}),
    output_token_ids=[9],
    eos_token_ids=(2,),
    seed=2**64 - 1,
    deadline_at=12.5,
    cache_salt="s",
    labels=Labels(bytes(12), bytes(4)),
)
INFO = ModelInfo(
    names=("a",),
    max_model_len=64,
    vocab_size=512,
    eos_token_ids=(257,),
    num_blocks=4,
    kv_bytes=0,
    backend="sim",
    default_params={"top_k": 5, "temperature": 0.5},
    load_seconds=0.1,
    cache_key=b"\x00\xff",
)
OUTPUT = SequenceOutput(
    request_id="1.0",
    token_ids=[4],
    finish_reason="stop",
    stop_token_id=4,
    logprobs=[TokenLogprobs(4, -0.5, 1, [4, 5], [-0.5, float("-inf")])],
)
TO_CORE = [
    wire.Configure(CONFIG, 20),
    wire.AddRequests([REQUEST, REQUEST]),
    wire.Abort(["1.0", "2.0"]),
    wire.CorePing(7),
    wire.ResetPrefixCache(),
    wire.Label("1.0", Labels(bytes(24), bytes(8))),
    wire.WatchResidency(on=True),
    wire.Shutdown(),
    wire.Shutdown(graceful=True),
]
FROM_CORE = [
    wire.CoreProgress(3, 9),
    wire.Ready(INFO),
    wire.Pong(7, steps=3, step_age_s=0.5, expected_s=0.1),
    wire.Outputs(StepOutput(outputs=[OUTPUT], stats=EngineStats(steps=4))),
    wire.Outputs(StepOutput(residency=ResidencyChange(bytes(12), bytes(8), {"disk": bytes(12)}))),
    wire.RequestRefused("1.0", "QueueFull", "full", retry_after_s=3),
    wire.Fatal("ModelError", "model.safetensors: truncated"),
]


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.integers(0, 400), max_size=8))
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(cuts):
    directions: list[tuple[list[Any], Any]] = [
        (TO_CORE, wire.TO_CORE),
        (FROM_CORE, wire.FROM_CORE),
    ]
    for messages, decoder in directions:
        stream = b"".join(wire.encode(message) for message in messages)
        edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
        reader: wire.MessageReader[Any] = wire.MessageReader(decoder)
        got = []
        for start, end in pairwise(edges):
            got += reader.feed(stream[start:end])
        assert got == messages


@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=200))
def test_random_bytes_in_a_frame_are_an_error_or_a_message_and_nothing_else(body):
    decoders: list[Any] = [wire.TO_CORE, wire.FROM_CORE]
    for decoder in decoders:
        reader: wire.MessageReader[Any] = wire.MessageReader(decoder)
        try:
            messages = reader.feed(struct.pack("<I", len(body)) + body)
        except wire.WireError:
            continue
        assert len(messages) == 1


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_a_damaged_message_is_an_error_or_another_message(data):
    frame = bytearray(wire.encode(data.draw(st.sampled_from(TO_CORE))))
    place = data.draw(st.integers(4, len(frame) - 1))
    frame[place] = data.draw(st.integers(0, 255))
    try:
        wire.MessageReader(wire.TO_CORE).feed(bytes(frame))
    except wire.WireError as error:
        assert "is no message" in str(error)


def test_a_frame_above_the_limit_is_refused_from_its_length_alone():
    reader = wire.MessageReader(wire.TO_CORE)
    with pytest.raises(wire.WireError, match="4294967295 bytes is above the limit"):
        reader.feed(b"\xff\xff\xff\xff")


def test_a_message_above_the_limit_is_not_sent(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME", 100)
    with pytest.raises(wire.WireError, match="above the limit of 100"):
        wire.encode(wire.AddRequests([REQUEST] * 10))


def test_settings_that_break_their_own_rules_do_not_pass():
    body = msgspec.msgpack.encode(
        {"type": "Configure", "log_level": 20, "config": {"memory_fraction": 7.0}}
    )
    with pytest.raises(wire.WireError, match="--memory-fraction must be above 0"):
        wire.MessageReader(wire.TO_CORE).feed(struct.pack("<I", len(body)) + body)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("no", param="prompt"),
        errors.ContextLengthExceeded("long", param="max_tokens"),
        errors.QueueFull("full", retry_after_s=9),
        errors.EngineDead("gone", code="draining"),
    ],
)
def test_a_request_error_is_the_same_error_on_the_other_side(error):
    (refused,) = wire.MessageReader(wire.FROM_CORE).feed(wire.encode(wire.refusal("r", error)))
    assert isinstance(refused, wire.RequestRefused)
    there = wire.error_of(refused)
    assert type(there) is type(error)
    for field in ("message", "param", "code", "status", "type", "retry_after_s"):
        assert getattr(there, field) == getattr(error, field)


def test_an_error_that_quotes_half_a_character_can_be_sent():
    error = errors.InvalidRequest("no keyword '\ud800'")
    (refused,) = wire.MessageReader(wire.FROM_CORE).feed(wire.encode(wire.refusal("r", error)))
    assert isinstance(refused, wire.RequestRefused)
    assert wire.error_of(refused).message == r"no keyword '\ud800'"


def test_a_start_up_error_keeps_its_kind_and_sentence():
    error = wire.startup_error_of(wire.Fatal("ModelError", "model.safetensors: truncated"))
    assert type(error) is errors.ModelError
    assert str(error) == "model.safetensors: truncated"
    assert isinstance(
        wire.startup_error_of(wire.Fatal("ExtensionMissing", "build it")), ImportError
    )
    missing = wire.startup_error_of(wire.Fatal("NoSuchModel", "x"))
    assert isinstance(missing, errors.ConfigError) and isinstance(missing, errors.ModelError)
    assert type(wire.startup_error_of(wire.Fatal("Whatever", "x"))) is errors.OctavoError
