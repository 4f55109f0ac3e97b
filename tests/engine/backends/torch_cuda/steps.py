"""Steps and devices' views of them, built from what a story says: contexts and new tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.backends.backend import BackendLimits, BackendStep
from octavo_engine.backends.torch.device_step import (
    DeviceStep,
    DrawParams,
    StepBuffer,
    StepSizes,
    StepTiles,
    WalkCut,
    cut_tiles,
    cut_walks,
)
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.sampling.batch import SamplingBatch
from octavo_engine.sampling.rows import new_table
from tests.engine.backends.driver import Driver, random_tokens, run_alone

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from octavo_engine.backends.torch.device_adapters import DeviceAdapters
    from tests.engine.backends.driver import LogitsBackend, Request

NUM_BLOCKS = 64
LIMITS = BackendLimits(max_tokens=128, max_seqs=16, max_logit_rows=24, max_model_len=256)
ROOMY = dataclasses.replace(LIMITS, max_seqs=64)  # for the rows that `make_step` leaves out


def make_step(
    sequences: list[tuple[int, int]],
    *,
    token_ids: list[list[int]] | None = None,
    all_logits: bool = False,
    seed: int = 0,
) -> BackendStep:
    """Each sequence is (tokens before this step, tokens in it). Blocks lie about at random."""
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(NUM_BLOCKS))
    num_rows = len(sequences) + 3
    tables = np.full((num_rows, LIMITS.max_model_len // BLOCK_SIZE), NUM_BLOCKS - 1, np.int32)
    rows = rng.permutation(num_rows)[: len(sequences)].astype(np.int32)
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for index, (context, count) in enumerate(sequences):
        row = rows[index]
        for block in range(-(-(context + count) // BLOCK_SIZE)):
            tables[row, block] = free.pop()
        for position in range(context, context + count):
            block, offset = divmod(position, BLOCK_SIZE)
            positions.append(position)
            slots.append(tables[row, block] * BLOCK_SIZE + offset)
        ids += token_ids[index] if token_ids else list(rng.integers(0, 50, count))
    counts = [count for _, count in sequences]
    starts = np.cumsum([0, *counts])
    logit_rows = np.arange(starts[-1]) if all_logits else starts[1:] - 1
    return BackendStep(
        token_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32)[None],
        seq_starts=starts.astype(np.int32),
        seq_lens=np.array([context + count for context, count in sequences], np.int32),
        rows=rows,
        block_tables=tables[None],
        logit_rows=logit_rows.astype(np.int32),
        copies=np.zeros((0, 3), np.int32),
    )


def pad(step: BackendStep) -> None:
    """Makes of a step of one token one with a row of padding behind it."""
    step.slots = np.array([[*step.slots[0], -1]], np.int32)
    step.positions = np.array([*step.positions, 0], np.int32)
    step.token_ids = np.array([*step.token_ids, 0], np.int32)
    step.seq_starts = np.array([0, 1, 2], np.int32)
    step.seq_lens = np.array([step.seq_lens[0], 0], np.int32)
    step.rows = np.array([step.rows[0]] * 2, np.int32)


def make_sampling(num_rows: int, **fields: Any) -> SamplingBatch:
    """One sequence a row of logits; `fields` of the table are values or lists of values."""
    table = new_table(num_rows)
    for name, value in fields.items():
        table[name] = value
    return SamplingBatch(
        table=table,
        rows=np.arange(num_rows, dtype=np.int32),
        positions=np.arange(8, 8 + num_rows, dtype=np.int32),
        targets=np.full(num_rows, -1, np.int32),
        history=np.zeros((num_rows, 8 + num_rows), np.int32),
    )


def on_device(
    step: BackendStep,
    device: torch.device,
    tiles: StepTiles,
    *,
    walks: WalkCut | None = None,
    width: int = 0,
) -> DeviceStep:
    """The step through the buffer that the backend uses."""
    sampling = make_sampling(len(step.logit_rows))
    sizes = StepSizes(
        len(step.token_ids), len(step.seq_lens), len(step.logit_rows), len(tiles.seqs)
    )
    buffer = StepBuffer(ROOMY, device, walks=walks, has_states=step.states is not None)
    buffer.send(buffer.fill(step, sampling, tiles, sizes))
    longest = int(step.seq_lens.max())
    is_decode = tiles.ends is not None and not width
    return buffer.step(sizes, is_decode=is_decode, max_seq_len=longest, host=step, width=width)


def on_device_adapted(
    step: BackendStep, device: torch.device, adapters: DeviceAdapters, slots: list[int]
) -> DeviceStep:
    """With the adapter in its slot for each sequence; -1: none."""
    step = dataclasses.replace(step, adapters=np.array(slots, np.int32))
    num_tiles = len(step.seq_lens)
    sizes = StepSizes(len(step.token_ids), num_tiles, len(step.logit_rows), num_tiles)
    sizes, tiles = adapters.cut_step(step, sizes)
    buffer = StepBuffer(ROOMY, device, adapters=adapters.cut)
    walks = cut_walks(step.seq_lens, 0)
    sampling = make_sampling(len(step.logit_rows))
    buffer.send(buffer.fill(step, sampling, walks, sizes, adapters=tiles))
    return buffer.step(sizes, is_decode=True, max_seq_len=256, host=step)


def of_prompts(step: BackendStep, device: torch.device, tokens_per_tile: int = 16) -> DeviceStep:
    return on_device(step, device, cut_tiles(step.seq_starts, tokens_per_tile))


def draw_params(sampling: SamplingBatch, device: torch.device) -> DrawParams:
    num_rows = len(sampling.rows)
    step = make_step([(7, 1)] * num_rows)
    sizes = StepSizes.of_decode(num_rows)
    buffer = StepBuffer(ROOMY, device)
    buffer.send(buffer.fill(step, sampling, cut_walks(step.seq_lens, 0), sizes))
    return buffer.draw_params(sizes)


def alone_and_together(
    backend: LogitsBackend,
) -> tuple[list[NDArray[np.float32]], list[Request], Driver]:
    """Two prompts' logits, each alone; and both, from steps that they share."""
    prompts = [random_tokens(count, seed=count) for count in (19, 3)]
    alone = [run_alone(backend, prompt) for prompt in prompts]
    driver = Driver(backend)
    requests = [driver.add(row, prompt) for row, prompt in enumerate(prompts)]
    driver.step([(requests[0], 16)])
    driver.step([(requests[1], 2), (requests[0], 2)])
    driver.step([(requests[0], 1), (requests[1], 1)])
    return alone, requests, driver
