"""A step as every worker applies it: plain arrays that refer to nothing, and their bytes.

A `BackendStep` looks into tables of the runner. A plan has only the rows of its own batch, so that
it can go to another process; row b of its tables is sequence b.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.backends.backend import BackendStep, StateStep
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendLimits

_MAGIC = 0x4F53_5031  # "OSP1": another layout has another one
_HEAD_ENTRIES = 2  # magic, number of arrays
_MAX_DIMENSIONS = 4
_MAX_ENTRIES = 1 << 31  # of one array: sizes are multiplied


class StepPlanError(ValueError):
    """The bytes are no plan; the message says what is wrong where."""


class _Field(NamedTuple):
    """An array of int32 and its sides: numbers, or letters that are equal in all arrays."""

    name: str
    sides: tuple[str | int, ...]
    is_optional: bool = False


# B sequences, T tokens, S rows of logits, C copies, G groups of layers, N blocks, L states to load.
# A new array goes to the end.
_FIELDS = (
    _Field("token_ids", ("T",)),
    _Field("positions", ("T",)),
    _Field("slots", ("G", "T")),
    _Field("seq_starts", ("B+1",)),
    _Field("seq_lens", ("B",)),
    _Field("block_tables", ("G", "B", "N")),
    _Field("logit_rows", ("S",)),
    _Field("copies", ("C", 3)),
    _Field("adapters", ("B",), is_optional=True),
    _Field("state_slots", ("B",), is_optional=True),  # these three come together
    _Field("state_saves", ("T",), is_optional=True),
    _Field("state_copies", ("L", 2), is_optional=True),
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as a BackendStep describes it; block_tables has a row for each sequence."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    seq_starts: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]  # [G, B, the most blocks that one of them has]
    logit_rows: NDArray[np.int32]
    copies: NDArray[np.int32]
    adapters: NDArray[np.int32] | None = None
    state_slots: NDArray[np.int32] | None = None
    state_saves: NDArray[np.int32] | None = None
    state_copies: NDArray[np.int32] | None = None

    @classmethod
    def of(cls, step: BackendStep) -> StepPlan:
        """Tokens must be known: a step that awaits those of one under way has no plan."""
        assert step.awaited is None, "a plan has all its tokens"
        assert step.input_rows is None, "ranks have no rows of pictures"
        states = step.states
        num_blocks = -(-int(step.seq_lens.max(initial=0)) // BLOCK_SIZE)
        return cls(
            step.token_ids,
            step.positions,
            step.slots,
            step.seq_starts,
            step.seq_lens,
            step.block_tables[:, step.rows, :num_blocks],
            step.logit_rows,
            step.copies,
            step.adapters,
            *((None, None, None) if states is None else states),
        )

    def step(self) -> BackendStep:
        return BackendStep(
            token_ids=self.token_ids,
            positions=self.positions,
            slots=self.slots,
            seq_starts=self.seq_starts,
            seq_lens=self.seq_lens,
            rows=np.arange(len(self.seq_lens), dtype=np.int32),
            block_tables=self.block_tables,
            logit_rows=self.logit_rows,
            copies=self.copies,
            adapters=self.adapters,
            states=self._states(),
        )

    def _states(self) -> StateStep | None:
        slots, saves, copies = self.state_slots, self.state_saves, self.state_copies
        if slots is None or saves is None or copies is None:
            return None
        return StateStep(slots, saves, copies)

    def encode(self) -> bytes:
        """Words of 32 bits: a head; of each array its number, dimensions and sides; all entries."""
        # Hot path: once a step.
        head = [_MAGIC, 0]
        parts: list[bytes] = []
        for number, field in enumerate(_FIELDS):
            array: NDArray[np.int32] | None = getattr(self, field.name)
            if array is not None:
                head += (number, array.ndim, *array.shape)
                parts.append(array.tobytes())
        head[1] = len(parts)
        return b"".join((struct.pack(f"<{len(head)}I", *head), *parts))

    @classmethod
    def decode(cls, data: bytes | bytearray) -> StepPlan:
        """The plan, whose arrays are views of `data`. Raises StepPlanError.

        Only the arrays' sizes are checked here; the backend checks their values.
        """
        arrays = _read(data)
        sides: dict[str, int] = {}
        for field in _FIELDS:
            if field.name in arrays:
                _check_sides(field, arrays[field.name].shape, sides)
            elif not field.is_optional:
                raise StepPlanError(f"a step plan without {field.name}")
        if len([name for name in arrays if name.startswith("state_")]) not in (0, 3):
            raise StepPlanError("a step plan with some of state_slots, state_saves, state_copies")
        return cls(**arrays)


def max_plan_bytes(limits: BackendLimits, num_groups: int = 1) -> int:
    """Of the largest step there can be, of a model with so many groups of layers."""
    blocks = -(-limits.max_model_len // BLOCK_SIZE)
    # And up to two copies in each group, an adapter, a state's slot and one to load.
    per_sequence = num_groups * (blocks + 6) + 7
    entries = (
        (3 + num_groups) * limits.max_tokens
        + per_sequence * limits.max_seqs
        + limits.max_logit_rows
    )
    return 4 * entries + 4096


def _read(data: bytes | bytearray) -> Mapping[str, NDArray[np.int32]]:
    if len(data) % 4 or len(data) < 4 * _HEAD_ENTRIES:
        raise StepPlanError(f"a step plan of {len(data)} bytes is cut off")
    entries = np.frombuffer(data, "<i4")
    # All that any known arrays can have in front of their entries.
    words = entries[: _HEAD_ENTRIES + len(_FIELDS) * (2 + _MAX_DIMENSIONS)].view("<u4").tolist()
    magic, count, *words = words
    if magic != _MAGIC:
        raise StepPlanError(f"a step plan begins with {magic:#x}; it must be {_MAGIC:#x}")
    shapes = _shapes(words, count)
    place = _HEAD_ENTRIES + sum(2 + len(shape) for shape in shapes.values())
    arrays: dict[str, NDArray[np.int32]] = {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        if size > _MAX_ENTRIES or place + size > len(entries):
            raise StepPlanError(
                f"{name} of a step plan has the shape {shape}, which its {len(data)} bytes do "
                "not hold"
            )
        array = entries[place : place + size]
        arrays[name] = array if len(shape) == 1 else array.reshape(shape)
        place += size
    if place != len(entries):
        raise StepPlanError(f"a step plan has {4 * (len(entries) - place)} bytes behind its arrays")
    return arrays


def _shapes(words: list[int], count: int) -> dict[str, tuple[int, ...]]:
    """Of so many arrays, in their order."""
    if count > len(_FIELDS):
        raise StepPlanError(f"a step plan has {count} arrays; {len(_FIELDS)} are known")
    shapes: dict[str, tuple[int, ...]] = {}
    place = 0
    for _ in range(count):
        number, dimensions = words[place : place + 2] if place + 2 <= len(words) else (0, 0)
        place += 2
        if number >= len(_FIELDS):
            raise StepPlanError(f"a step plan has an array {number}; {len(_FIELDS)} are known")
        name = _FIELDS[number].name
        if name in shapes:
            raise StepPlanError(f"a step plan has {name} twice")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise StepPlanError(f"{name} of a step plan has {dimensions} dimensions")
        if place + dimensions > len(words):
            raise StepPlanError("the head of a step plan is cut off")
        shapes[name] = tuple(words[place : place + dimensions])
        place += dimensions
    return shapes


def _check_sides(field: _Field, shape: tuple[int, ...], sides: dict[str, int]) -> None:
    """Against the arrays before it."""
    wanted: list[int] = []
    for side, size in zip(field.sides, shape, strict=False):
        if isinstance(side, int):
            wanted.append(side)
        elif side == "B+1":
            wanted.append(1 + sides.setdefault("B", size - 1))
        else:
            wanted.append(sides.setdefault(side, size))
    if len(shape) != len(field.sides) or list(shape) != wanted:
        raise StepPlanError(
            f"{field.name} of a step plan has the shape {shape}; it must be "
            f"({', '.join(map(str, field.sides))}) with {sides}"
        )
