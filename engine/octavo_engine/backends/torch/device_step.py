"""A step's arrays on the device: packed into one pinned buffer, sent by one copy.

Every number is four bytes wide, so one int32 buffer holds them all; floats are the same words seen
as float32. A captured graph reads fixed places, so a layout depends on sizes alone: the sizes of a
bucket give the same places each time, and what is new in block tables, whose length varies, comes
last. The tables themselves stay on the device.

Behind them all lies a word for each row: its last sampled token, left there by the draw. A step
that is launched before the last one's tokens are known finds them; so token ids are gathered, each
from its own word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from octavo_engine.backends.torch.adapter_tiles import AdapterCut
from octavo_engine.backends.torch.device_tables import DeviceTables
from octavo_engine.backends.torch.landing import marks_of
from octavo_engine.backends.torch.transfers import send
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.backends.torch.adapter_tiles import AdapterTiles
    from octavo_engine.backends.torch.device_tables import TableChanges
    from octavo_engine.backends.torch.landing import StreamMark
    from octavo_engine.sampling.batch import SamplingBatch

GREEDY_BELOW = np.float32(1e-5)
LEAST = np.float32(-32.0)  # below it exp is less than half a unit of mass
# Fields begin at multiples of 64 bytes: Triton compiles a kernel anew for each pattern of aligned
# and unaligned arguments that it meets.
ALIGNMENT = 16
MAX_KNOWN = 256  # layouts that are remembered
PART_TOKENS = 128  # the shortest part of a context, and what all are multiples of
CHANGES_PER_SEQ = 4  # entries of block tables that a step's buffer has room for, on average


class StepSizes(NamedTuple):
    """How many of each; in a bucket, how many there is room for."""

    tokens: int
    seqs: int
    logits: int
    tiles: int
    adapter_tiles: int = 0  # 0: the step has no adapters
    adapter_rows: int = 0  # of all tiles

    @classmethod
    def of_decode(cls, num_seqs: int, spare_parts: int = 0) -> StepSizes:
        return cls(num_seqs, num_seqs, num_seqs, num_seqs + spare_parts)


class Filled(NamedTuple):
    """What is to be sent: the words of the step, and entries of block tables behind them."""

    num_words: int
    changes: TableChanges


class StepTiles(NamedTuple):
    """The attention kernel's programs. Of a step that holds prompts: which sequence, and which of
    its new tokens comes first. Of single tokens: which sequence, and the part of its context that
    is looked at; the parts of a sequence lie side by side."""

    seqs: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32] | None = None  # of single tokens


@dataclass(frozen=True, slots=True)
class DrawParams:
    """What the draw needs to know of each row of logits."""

    seeds: Tensor  # [2, S] int32: low words, then high words
    positions: Tensor  # [S] int32
    targets: Tensor  # [S] int32
    inverse_temperatures: Tensor  # [S] float32; 0: greedy
    leasts: Tensor  # [S] float32: min-p as a bound of scaled logits
    top_ps: Tensor  # [S] float32
    top_ks: Tensor  # [S] int32
    kept_at: Tensor  # [S] int32: whose word of `kept` the token is left in
    kept: Tensor  # int32

    def first(self, num_rows: int) -> DrawParams:
        """Without the padding behind."""
        return DrawParams(
            seeds=self.seeds[:, :num_rows].contiguous(),
            positions=self.positions[:num_rows],
            targets=self.targets[:num_rows],
            inverse_temperatures=self.inverse_temperatures[:num_rows],
            leasts=self.leasts[:num_rows],
            top_ps=self.top_ps[:num_rows],
            top_ks=self.top_ks[:num_rows],
            kept_at=self.kept_at[:num_rows],
            kept=self.kept,
        )


class DeviceStateStep(NamedTuple):
    """Where recurrent states are, of models that have some; as `StateStep`."""

    slots: Tensor  # [B]  -1: a sequence of padding, which has none
    saves: Tensor  # [T]
    token_seqs: Tensor  # [T]  whose each token is


class GroupPlaces(NamedTuple):
    """What a step has of its own in each group of layers."""

    slots: Tensor  # -1: nothing is written
    table_starts: Tensor  # where in `tables` a sequence's blocks begin
    table_base: int = 0  # and where those of row 0 do


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step as the operations see it. `host` is None while a graph is captured."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor  # of the first group of layers, as `table_starts`
    seq_starts: Tensor
    seq_lens: Tensor
    table_starts: Tensor
    tables: Tensor  # of all rows
    table_width: int  # entries of a row
    table_base: int  # where the group's tables begin
    logit_rows: Tensor
    tile_seqs: Tensor
    tile_starts: Tensor
    tile_ends: Tensor
    seq_tiles: Tensor  # the first tile of each sequence, if they are parts of contexts
    arrivals: Tensor  # zeros, which the parts of a sequence are counted in
    is_decode: bool  # one token and one row of logits for each sequence
    max_seq_len: int
    host: BackendStep | None
    adapter_tiles: Tensor | None = None  # the arena of each; -1: padding. None: no adapters
    adapter_rows: Tensor | None = None  # of all tiles, as many each; -1: padding
    width: int = 0  # up to so many tokens a sequence, whose contexts are in parts; 0: in tiles
    states: DeviceStateStep | None = None
    other_groups: tuple[GroupPlaces, ...] = ()  # behind the first

    def by_group(self) -> list[DeviceStep]:
        """The step as the layers of each group see it."""
        others = (replace(self, **places._asdict()) for places in self.other_groups)
        return [self, *others]


def cut_tiles(seq_starts: NDArray[np.int32], tokens_per_tile: int) -> StepTiles:
    """Each sequence's tokens, `tokens_per_tile` at a time."""
    counts = -(-np.diff(seq_starts) // tokens_per_tile)
    seqs = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(seqs)) - before) * tokens_per_tile
    return StepTiles(seqs, starts.astype(np.int32))


class WalkCut(NamedTuple):
    """How a backend's kernels want the contexts of single tokens cut."""

    spare_parts: int = 0  # beside one for each sequence; 0: none is cut
    num_heads: int = 0  # that count their parts' arrivals, of each sequence


def cut_walks(seq_lens: NDArray[np.int32], spare_parts: int) -> StepTiles:
    """Contexts in parts of equal length, at most `spare_parts` more of them than sequences."""
    num_seqs = len(seq_lens)
    length = 0
    if spare_parts:
        length = -(-int(seq_lens.sum()) // spare_parts)
        length = max(1, -(-length // PART_TOKENS)) * PART_TOKENS
    if not spare_parts or int(seq_lens.max(initial=0)) <= length:  # most steps
        seqs = np.arange(num_seqs, dtype=np.int32)
        return StepTiles(seqs, np.zeros_like(seqs), seq_lens)
    counts = np.maximum(-(-seq_lens // length), 1)
    seqs = np.repeat(np.arange(num_seqs, dtype=np.int32), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    starts = ((np.arange(len(seqs)) - before) * length).astype(np.int32)
    return StepTiles(seqs, starts, np.minimum(starts + np.int32(length), seq_lens[seqs]))


def is_decode(step: BackendStep) -> bool:
    """One token a sequence, and the logits of all of them."""
    return len(step.token_ids) == len(step.seq_lens) == len(step.logit_rows) > 0


class StepBuffer:
    """The pinned words, their twin on the device, and the views of both. fill() and send() go in
    pairs."""

    def __init__(
        self,
        limits: BackendLimits,
        device: torch.device,
        make_mark: Callable[[], StreamMark] | None = None,
        walks: WalkCut | None = None,
        adapters: AdapterCut | None = None,
        num_few: int = 0,
        *,
        has_states: bool = False,
        num_groups: int = 1,
    ) -> None:
        """`num_few`: tokens of the largest step of a few for each sequence; see few_steps.py."""
        walks = walks or WalkCut()
        self._kind = StepKind(has_states, num_groups)
        blocks = -(-limits.max_model_len // BLOCK_SIZE)
        most = StepSizes(
            limits.max_tokens,
            max(limits.max_seqs, num_few + 1),
            max(limits.max_logit_rows, limits.max_seqs, num_few),
            limits.max_tokens + max(limits.max_seqs, num_few + 1) + walks.spare_parts,
            *((adapters or AdapterCut()).most(limits.max_tokens, limits.max_seqs)),
        )
        self._room = CHANGES_PER_SEQ * limits.max_seqs * num_groups
        num_words = _Layout(most, self._kind).num_words + 2 * self._room
        num_words = -(-num_words // ALIGNMENT) * ALIGNMENT
        self._tables = DeviceTables(limits.max_seqs, blocks, device, num_groups=num_groups)
        # Two, in turn: one is filled while the other's copy may still be queued.
        self._sides = [_Side(num_words, device) for _ in range(2)]
        self._make_mark = make_mark or marks_of(device)
        self._last_at = num_words
        self._spare_row = limits.max_seqs  # the word that is nobody's
        self._device = torch.zeros(
            num_words + limits.max_seqs + 1, dtype=torch.int32, device=device
        )
        num_counted = max(1, limits.max_seqs * walks.num_heads)
        self._arrivals = torch.zeros(num_counted, dtype=torch.int32, device=device)
        self._layouts: dict[StepSizes, _Layout] = {}

    def fill(
        self,
        step: BackendStep,
        sampling: SamplingBatch,
        tiles: StepTiles,
        sizes: StepSizes,
        *,
        draws_later: bool = False,
        adapters: AdapterTiles | None = None,
    ) -> Filled:
        """Lay the step out in the pinned buffer. `draws_later`: what is drawn with the step is not
        what counts, so it is not kept."""
        # Hot path: once per step. The GPU waits for it.
        self._sides.reverse()
        side = self._sides[0]
        if side.sent is not None:
            side.sent.wait()  # of two steps ago: it is there, unless nobody waited for that step
        layout = self._layout(sizes)
        views = side.views(sizes, layout)
        num_seqs = len(step.seq_lens)
        _put(views["token_ids"], step.token_ids, 0)
        self._place_tokens(views["token_at"], step, layout)
        kept = np.where(sampling.targets < 0, sampling.rows, self._spare_row)
        _put(views["kept_at"], kept, self._spare_row)
        if draws_later:
            views["kept_with_step_at"].fill(self._spare_row)
        else:
            _put(views["kept_with_step_at"], kept, self._spare_row)
        _put(views["positions"], step.positions, 0)
        _put(views["seq_lens"], step.seq_lens, 0)
        views["seq_starts"][: num_seqs + 1] = step.seq_starts
        self._pad(views, sizes, step, tiles)
        for group in range(self._kind.num_groups):
            name, starts = _of_group(group), self._tables.starts(step.rows, group)
            _put(views["slots" + name], step.slots[group], -1)
            _put(views["table_starts" + name], starts, 0)
        _put(views["logit_rows"], step.logit_rows, 0)
        if self._kind.has_states:
            _fill_states(views, step)
        _fill_draw(views, sampling)
        if adapters is not None:
            _put(views["adapter_tiles"], adapters.arenas, -1)
            _put(views["adapter_rows"], adapters.rows, -1)
        changes = self._tables.find_changes(step)
        count = len(changes.places)
        if count <= self._room:
            ends = layout.num_words + count, layout.num_words + 2 * count
            side.words[layout.num_words : ends[0]] = changes.places
            side.words[ends[0] : ends[1]] = changes.blocks
        return Filled(layout.num_words, changes)

    def send(self, filled: Filled) -> None:
        """One copy, unless a great many entries of block tables are new."""
        side = self._sides[0]
        first, changes = filled
        count = len(changes.places)
        is_within = count <= self._room
        num_words = first + 2 * count if is_within else first
        self._device[:num_words].copy_(side.host[:num_words], non_blocking=True)
        side.sent = self._make_mark()
        if count and is_within:
            middle = first + count
            self._tables.put(self._device[first:middle], self._device[middle:num_words])
        elif count:
            device = self._device.device
            self._tables.put(send(changes.places, device), send(changes.blocks, device))
        self._tables.sent(changes)

    def step(
        self,
        sizes: StepSizes,
        *,
        is_decode: bool,
        max_seq_len: int,
        host: BackendStep | None,
        width: int = 0,
    ) -> DeviceStep:
        """Views of the device's words."""
        t = self._split(sizes)
        names = ("positions", "slots", "seq_starts", "seq_lens", "table_starts",
                 "logit_rows", "tile_seqs", "tile_starts", "tile_ends", "seq_tiles")  # fmt: skip
        return DeviceStep(
            token_ids=self._device.index_select(0, t["token_at"]),
            **{name: t[name] for name in names},
            tables=self._tables.flat,
            table_width=self._tables.width,
            table_base=0,
            arrivals=self._arrivals,
            is_decode=is_decode,
            max_seq_len=max_seq_len,
            host=host,
            adapter_tiles=t["adapter_tiles"] if sizes.adapter_tiles else None,
            adapter_rows=t["adapter_rows"] if sizes.adapter_tiles else None,
            width=width,
            states=DeviceStateStep(t["state_slots"], t["state_saves"], t["token_seqs"])
            if self._kind.has_states
            else None,
            other_groups=tuple(
                GroupPlaces(
                    t["slots" + _of_group(group)],
                    t["table_starts" + _of_group(group)],
                    group * self._tables.group_size,
                )
                for group in range(1, self._kind.num_groups)
            ),
        )

    def draw_params(self, sizes: StepSizes, *, with_step: bool = False) -> DrawParams:
        """`with_step`: of the draw that belongs to the step itself, and to its graph."""
        t = self._split(sizes)
        return DrawParams(
            seeds=t["seeds"].view(2, sizes.logits),
            positions=t["draw_positions"],
            targets=t["targets"],
            inverse_temperatures=t["inverse_temperatures"].view(torch.float32),
            leasts=t["leasts"].view(torch.float32),
            top_ps=t["top_ps"].view(torch.float32),
            top_ks=t["top_ks"],
            kept_at=t["kept_with_step_at" if with_step else "kept_at"],
            kept=self._device[self._last_at :],
        )

    def _pad(self, views: _Views, sizes: StepSizes, step: BackendStep, tiles: StepTiles) -> None:
        """Sequences and tiles of padding. Their sequences have no tokens behind them, so nothing is
        read for them; where contexts are in parts each has one of its own, as far as there are any,
        elsewhere the first has them all, and the tiles that are left begin where it ends."""
        num_seqs, num_tiles = len(step.seq_lens), len(tiles.seqs)
        seqs = views["tile_seqs"]
        seqs[:num_tiles] = tiles.seqs
        if tiles.ends is not None:
            spare = sizes.seqs - num_seqs
            rest = np.arange(num_seqs, sizes.seqs, dtype=np.int32)
            first = np.int32(len(step.token_ids) - num_seqs + 1)
            views["seq_starts"][num_seqs + 1 :] = np.minimum(rest + first, sizes.tokens)
            seqs[num_tiles : num_tiles + spare] = rest
            seqs[num_tiles + spare :] = -1
            _put(views["tile_starts"], tiles.starts, 0)
            _put(views["tile_ends"], tiles.ends, 0)
            views["seq_tiles"][:num_seqs] = np.searchsorted(tiles.seqs, np.arange(num_seqs))
            views["seq_tiles"][num_seqs:] = num_tiles + np.arange(spare + 1)
        else:
            views["seq_starts"][num_seqs + 1 :] = sizes.tokens
            seqs[num_tiles:] = num_seqs
            _put(views["tile_starts"], tiles.starts, sizes.tokens)

    def _place_tokens(self, view: NDArray[np.int32], step: BackendStep, layout: _Layout) -> None:
        first, end = layout.places["token_ids"]
        view[:] = np.arange(first, end, dtype=np.int32)
        if step.awaited is not None:
            waiting = np.flatnonzero(step.awaited >= 0)
            view[waiting] = self._last_at + step.awaited[waiting]

    def _layout(self, sizes: StepSizes) -> _Layout:
        layout = self._layouts.get(sizes)
        if layout is None:
            _make_room(self._layouts)
            layout = self._layouts[sizes] = _Layout(sizes, self._kind)
        return layout

    def _split(self, sizes: StepSizes) -> dict[str, Tensor]:
        layout = self._layout(sizes)
        return {name: self._device[start:end] for name, (start, end) in layout.places.items()}


class _Side:
    """Pinned words, and when they were sent last."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.host = torch.zeros(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.words: NDArray[np.int32] = self.host.numpy()
        self.sent: StreamMark | None = None
        self._views: dict[StepSizes, _Views] = {}

    def views(self, sizes: StepSizes, layout: _Layout) -> _Views:
        views = self._views.get(sizes)
        if views is None:
            _make_room(self._views)
            views = {name: self.words[start:end] for name, (start, end) in layout.places.items()}
            self._views[sizes] = views
        return views


def _make_room(known: dict[StepSizes, Any]) -> None:
    """Those of graphs come again and again; of the others there is no end."""
    if len(known) >= MAX_KNOWN:
        known.clear()


_Views: TypeAlias = "dict[str, NDArray[np.int32]]"


class _Layout:
    """Where each field lies, and where they end."""

    def __init__(self, sizes: StepSizes, kind: StepKind) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        self.num_words = 0
        for name, length in (_fields(sizes) | kind.fields(sizes)).items():
            self.places[name] = (self.num_words, self.num_words + length)
            self.num_words += -(-length // ALIGNMENT) * ALIGNMENT


def _fields(sizes: StepSizes) -> dict[str, int]:
    """Names and lengths, in their order."""
    tokens, seqs, logits, tiles, adapter_tiles, adapter_rows = sizes
    return {
        "token_ids": tokens,
        "token_at": tokens,
        "positions": tokens,
        "slots": tokens,
        "seq_starts": seqs + 1,
        "seq_lens": seqs,
        "table_starts": seqs,
        "logit_rows": logits,
        "kept_at": logits,
        "kept_with_step_at": logits,
        "tile_seqs": tiles,
        "tile_starts": tiles,
        "tile_ends": tiles,
        "seq_tiles": seqs + 1,
        "seeds": 2 * logits,
        "draw_positions": logits,
        "targets": logits,
        "inverse_temperatures": logits,
        "leasts": logits,
        "top_ps": logits,
        "top_ks": logits,
        "adapter_tiles": adapter_tiles,
        "adapter_rows": adapter_rows,
    }


class StepKind(NamedTuple):
    """What a model's steps have that not all have."""

    has_states: bool
    num_groups: int

    def fields(self, sizes: StepSizes) -> dict[str, int]:
        """Names and lengths of what they have besides."""
        found: dict[str, int] = {}
        for name in map(_of_group, range(1, self.num_groups)):
            found |= {"slots" + name: sizes.tokens, "table_starts" + name: sizes.seqs}
        if self.has_states:
            found |= {"state_slots": sizes.seqs, "state_saves": sizes.tokens}
            found["token_seqs"] = sizes.tokens
        return found


def _of_group(group: int) -> str:
    return "" if group == 0 else f" of group {group}"


def _fill_states(views: _Views, step: BackendStep) -> None:
    """Once `seq_starts` has its padding. A step that says nothing of states changes none."""
    nothing = np.empty(0, np.int32)
    _put(views["state_slots"], nothing if step.states is None else step.states.slots, -1)
    _put(views["state_saves"], nothing if step.states is None else step.states.saves, -1)
    counts = np.diff(views["seq_starts"])
    views["token_seqs"][:] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _put(view: NDArray[np.int32], values: NDArray[np.int32], padding: int) -> None:
    view[: len(values)] = values
    view[len(values) :] = padding


def _fill_draw(views: _Views, sampling: SamplingBatch) -> None:
    num_rows = len(sampling.rows)
    entries = sampling.table[sampling.rows]
    seeds = views["seeds"].reshape(2, -1)
    words = np.ascontiguousarray(entries["seed"]).view(np.uint32).view(np.int32)
    seeds[0, :num_rows], seeds[1, :num_rows] = words[0::2], words[1::2]  # little endian
    seeds[:, num_rows:] = 0
    _put(views["draw_positions"], sampling.positions, 0)
    _put(views["targets"], sampling.targets, -1)
    temperatures = entries["temperature"]
    is_greedy = temperatures < GREEDY_BELOW
    inverse = np.float32(1) / np.where(is_greedy, np.float32(1), temperatures)
    _put_floats(views["inverse_temperatures"], np.where(is_greedy, np.float32(0), inverse), 0.0)
    has_filter = (entries["min_p"] > 0) | (entries["top_p"] < 1) | (entries["top_k"] > 0)
    leasts = np.where(has_filter, LEAST, np.float32(-np.inf))
    if (with_min_p := np.flatnonzero(entries["min_p"] > 0)).size:
        bounds = np.log(entries["min_p"][with_min_p].astype(np.float64)).astype(np.float32)
        leasts[with_min_p] = np.maximum(LEAST, bounds)
    _put_floats(views["leasts"], leasts, -np.inf)
    _put_floats(views["top_ps"], entries["top_p"], 1.0)
    _put(views["top_ks"], np.ascontiguousarray(entries["top_k"]), 0)


def _put_floats(view: NDArray[np.int32], values: NDArray[np.float32], padding: float) -> None:
    floats = view.view(np.float32)
    floats[: len(values)] = values
    floats[len(values) :] = padding
