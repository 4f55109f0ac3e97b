"""The kernels of recurrent states against plain torch, token by token: outputs, states and saves.

Red when: a chunk's decay counts from another token; a state is saved a token late; a convolution
takes an input of another sequence; what belongs to no sequence is read or written.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo_engine.backends.backend import StateStep
from octavo_engine.backends.torch.device_states import DeviceStates
from octavo_engine.backends.torch.device_step import cut_walks
from octavo_engine.backends.torch.operands import SelectiveOperands
from octavo_engine.backends.torch.scans import PlainScans
from octavo_engine.backends.torch.triton.scans import TritonScans
from octavo_engine.caches import KVSpec, StateSpec, one_group
from octavo_engine.ops import ConvSpec, DeltaSpec, SelectiveSpec, SsdSpec
from tests.engine.backends.torch_cuda.steps import make_step, of_prompts, on_device

pytestmark = pytest.mark.slow  # kernels in the interpreter

NUM_SLOTS = 24
# Contexts and new tokens: a beginning, single tokens, and prompts that go on.
PROMPTS = [(0, 37), (50, 1), (20, 45), (0, 1), (3, 2)]
DECODES = [(0, 1), (9, 1), (30, 1)]
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


class Rig:
    """One layer's states in slots among others, all numbers that nobody may read NaN."""

    def __init__(self, sequences, conv, scan, device, *, saves_at=()):
        spec = StateSpec(conv, scan)
        self.layout = one_group([KVSpec(1, 16), StateSpec((1, 5)), spec])
        self.offset, self.device = spec.scan_offset, device
        self.rng = np.random.default_rng(3)
        step = make_step(sequences)
        places = self.rng.permutation(NUM_SLOTS).astype(np.int32)
        saves = np.full(len(step.token_ids), -1, np.int32)
        saves[list(saves_at)] = places[8 : 8 + len(saves_at)]
        slots = places[: len(sequences)]
        self.step = dataclasses.replace(
            step, states=StateStep(slots, saves, np.zeros((0, 2), np.int32))
        )
        self.before = np.full((NUM_SLOTS, spec.num_values), np.nan, np.float32)
        goes_on = step.seq_lens > np.diff(step.seq_starts)
        numbers = self.rng.normal(size=(goes_on.sum(), spec.num_values))
        self.before[slots[goes_on]] = numbers.astype(np.float32)

    def tensor(self, *shape, dtype=torch.float32):
        values = torch.from_numpy(self.rng.normal(size=shape).astype(np.float32))
        return values.to(self.device).to(dtype)

    def columns(self, count, dtype=torch.float32):
        """Of a wider matrix."""
        return self.tensor(len(self.step.token_ids), count + 7, dtype=dtype)[:, 3 : 3 + count]

    def view(self):
        if (np.diff(self.step.seq_starts) == 1).all():
            return on_device(self.step, self.device, cut_walks(self.step.seq_lens, 0))
        return of_prompts(self.step, self.device)

    def run(self, kernels, compute):
        states = DeviceStates(self.layout, NUM_SLOTS, self.device)
        states.layer(1)[:] = 7.0
        states.layer(2)[:] = torch.from_numpy(self.before).to(self.device)
        with torch.inference_mode():
            out = compute(kernels, states, self.view())
        assert (states.layer(1) == 7.0).all(), "another layer's"
        return out.float().cpu().numpy(), states.layer(2).cpu().numpy()

    def check(self, compute, *, invariant=False, used=slice(None), **close):
        found, states = self.run(TritonScans(batch_invariant=invariant), compute)
        truth, states_then = self.run(PlainScans(), compute)
        assert np.isfinite(truth).all()
        np.testing.assert_allclose(found, truth, **(close or CLOSE))
        np.testing.assert_allclose(states[:, used], states_then[:, used], **(close or CLOSE))


@pytest.mark.parametrize("sequences", [PROMPTS, DECODES], ids=["prompts", "single tokens"])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("kernel", "has_bias", "activation"), [(4, True, "silu"), (2, False, None)]
)
def test_convolutions(sequences, invariant, kernel, has_bias, activation, device):
    columns = 300
    saves = (1, 2) if sequences is DECODES else (0, 1, 4, 30, 36, 37, 38, 60)
    rig = Rig(sequences, (kernel - 1, columns), (0, 0, 0), device, saves_at=saves)
    x = rig.columns(columns)
    spec = ConvSpec(
        layer=2, kernel=kernel, weight=rig.tensor(columns, 1, kernel),
        bias=rig.tensor(columns) if has_bias else None, activation=activation,
    )  # fmt: skip
    # What lies between the convolution's part and its end is nobody's.
    used = slice(0, (kernel - 1) * columns)
    rig.check(
        lambda kernels, states, step: kernels.short_conv(x, states, step, spec),
        invariant=invariant, used=used,
    )  # fmt: skip


def ssd(rig, heads, dim, groups, size, dtype=torch.float32, shift=0.0, **limits):
    xbc = rig.columns(heads * dim + 2 * groups * size, dtype)
    dt = rig.columns(heads, dtype)
    spec = SsdSpec(
        layer=2, offset=rig.offset, num_heads=heads, head_dim=dim, num_groups=groups,
        state_size=size, a_log=rig.tensor(heads), d=rig.tensor(heads),
        dt_bias=rig.tensor(heads) + shift, **limits,
    )  # fmt: skip
    return lambda kernels, states, step: kernels.ssd_scan(xbc, dt, states, step, spec)


@pytest.mark.parametrize(
    ("sequences", "saves"),
    [(PROMPTS, ()), (PROMPTS, (0, 15, 16, 36, 37, 38, 50, 82)), (DECODES, (0, 2))],
    ids=["prompts", "saves", "single tokens"],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_scans_of_mamba2(sequences, saves, invariant, device):
    rig = Rig(sequences, (2, 11), (4, 20, 24), device, saves_at=saves)
    compute = ssd(rig, 4, 24, 2, 20, dt_min=0.01, dt_max=1.5)
    rig.check(compute, invariant=invariant, used=slice(rig.offset, None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_in_16_bits_are_as_near_as_their_inputs(dtype, device):
    rig = Rig([(0, 100)], (3, 8), (8, 128, 64), device, saves_at=(63,))
    compute = ssd(rig, 8, 64, 1, 128, dtype)
    found, states = rig.run(TritonScans(batch_invariant=False), compute)
    truth, states_then = rig.run(PlainScans(), compute)
    assert rig.step.states is not None
    used = rig.step.states.slots[0], slice(rig.offset, None)
    assert np.abs(found - truth).mean() < 0.01 * truth.std()
    assert np.abs(states[used] - states_then[used]).mean() < 0.005 * states_then[used].std()


@pytest.mark.parametrize(
    ("sequences", "saves"), [(PROMPTS, (0, 16, 38)), (DECODES, (1,))], ids=["prompts", "decode"]
)
def test_scans_of_mamba1(sequences, saves, device):
    width, size = 100, 12
    rig = Rig(sequences, (3, width), (1, size, width), device, saves_at=saves)
    operands = SelectiveOperands(*(rig.columns(count) for count in (width, width, size, size)))
    spec = SelectiveSpec(
        layer=2, offset=rig.offset, width=width, state_size=size, a_log=rig.tensor(width, size),
        d=rig.tensor(width), dt_bias=rig.tensor(width),
    )  # fmt: skip
    rig.check(
        lambda kernels, states, step: kernels.selective_scan(operands, states, step, spec),
        used=slice(rig.offset, None),
    )


def delta(rig, heads, key_heads, size, dim, dtype=torch.float32):
    qkv = rig.columns(2 * key_heads * size + heads * dim, dtype)
    gates = rig.columns(2 * heads, dtype)
    spec = DeltaSpec(
        layer=2, offset=rig.offset, num_key_heads=key_heads, num_value_heads=heads, key_dim=size,
        value_dim=dim, a_log=rig.tensor(heads), dt_bias=rig.tensor(heads),
    )  # fmt: skip
    return lambda kernels, states, step: kernels.delta_rule(qkv, gates, states, step, spec)


@pytest.mark.parametrize(
    ("sequences", "saves"),
    [(PROMPTS, ()), (PROMPTS, (0, 16, 36, 38, 82)), (DECODES, (1,))],
    ids=["prompts", "saves", "single tokens"],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_delta_rules(sequences, saves, invariant, device):
    rig = Rig(sequences, (3, 4), (4, 24, 20), device, saves_at=saves)
    rig.check(delta(rig, 4, 2, 24, 20), invariant=invariant, used=slice(rig.offset, None))


@pytest.mark.parametrize("shift", [-14.0, 30.0])
@pytest.mark.parametrize("invariant", [False, True])
def test_steps_are_exact_far_from_zero(shift, invariant, device):
    """softplus of numbers far below zero is exp of them, far above the number itself."""
    rig = Rig([(5, 9)], (1, 3), (1, 16, 16), device)
    compute = ssd(rig, 1, 16, 1, 16, shift=shift)
    close = {"rtol": 1e-4, "atol": 1e-5 if shift < 0 else 1e-3}
    rig.check(compute, invariant=invariant, used=slice(rig.offset, None), **close)
