"""Towers and projectors on the CPU: two programs on the threads of the language model's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.media import (
    PartOrder,
    brought_together,
    num_patches,
    patch_places,
    pixel_rows,
    put_together,
    tiles_of,
    timed_part,
    windows_of,
    with_positions,
)
from octavo_engine.backends.native.compiled import compile_forward
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.native.packing import PANEL_ROWS
from octavo_engine.backends.native.parts import op_costs, part_bounds
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ConfigError
from octavo_engine.models.hearing import media_tower
from octavo_engine.models.vision import MediaProjector
from octavo_engine.ops import layer_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.media import Windows
    from octavo_engine.backends.native.emit import CompiledProgram
    from octavo_engine.backends.native.graph import Dtype, Value
    from octavo_engine.backends.native.recorder import Recorder
    from octavo_engine.models.vision_config import MediaConfig
    from octavo_engine.state.media import MediaItem
    from octavo_engine.weights.checkpoint import Checkpoint


class _Tile(NamedTuple):
    """What a tower reads of a tile."""

    pixels: NDArray[np.float32]
    places: NDArray[np.int32] | None
    windows: Windows | None


class _UnderWay(NamedTuple):
    """An item of which some parts are computed."""

    tiles: list[MediaItem]
    bounds: list[int]  # of parts, in the instructions of all tiles one after the other
    rows: list[NDArray[np.float32]]  # of the tiles that are done


class NativeMediaEncoder:
    """A MediaEncoder in csrc. One tile at a time: its patches keep the threads busy.

    Parts are cut between instructions. What one leaves for the next stays where the program has it:
    nothing else runs in its memory meanwhile.
    """

    def __init__(
        self,
        config: MediaConfig,
        checkpoint: Checkpoint,
        team: _native.Team,
        dtype: Dtype,
        *,
        is_fused: bool = True,
    ) -> None:
        vision = config.vision
        assert vision.head_columns % PANEL_ROWS == 0
        self.config = config
        # Weights of towers are few and not quantised in files: they stay as exact as `dtype` is.
        loader = NativeLoader(checkpoint, team, dtype, quantization="none")
        tower, projector = media_tower(config, loader), MediaProjector(config, loader)
        deep = [MediaProjector(config, loader, i) for i in range(len(vision.deep_layers))]
        loader.finish()
        self._kept = [layer_output(index) for index in vision.deep_layers]
        self._tower = _compiled(
            tower.forward, team, vision.num_tokens, is_fused=is_fused, keep=self._kept
        )
        self._square = tower.stretched
        self._projector = _compiled(projector.forward, team, config.tile_rows, is_fused=is_fused)
        self._deep = [
            _compiled(each.forward, team, config.tile_rows, is_fused=is_fused) for each in deep
        ]
        self._newline = projector.newline
        num_blocks = -(-vision.num_tokens // BLOCK_SIZE)
        self._kv = _native.KVCache(
            num_blocks, [(0, 0, vision.num_heads, vision.head_columns)], [0], "f32"
        )
        self._order = PartOrder()
        self._under_way: _UnderWay | None = None
        self._tile: _Tile | None = None  # of it, that is begun

    @property
    def work_bytes(self) -> int:
        vision = self.config.vision
        queries = 4 * vision.num_tokens * vision.num_heads * vision.head_columns
        # Keys and values as floats too, and what is rotated before it is attended with.
        projectors = self._projector.arena_bytes + sum(each.arena_bytes for each in self._deep)
        return self._tower.arena_bytes + projectors + 3 * queries

    def measure(self) -> float:
        self._order = PartOrder()  # what is under way is written over
        return timed_part(self.config, lambda rows, places: self._run(self._tower, rows, places))

    def encode(self, item: MediaItem) -> NDArray[np.float32]:
        rows = self.encode_part(item, 0, 1)
        assert rows is not None, "it was the last part"
        return rows

    def encode_part(self, item: MediaItem, part: int, num_parts: int) -> NDArray[np.float32] | None:
        self._order.begin(item, part, num_parts)
        if part == 0:
            self._under_way = self._begin(item, num_parts)
        way, length = self._under_way, self._tower.program.num_instructions
        assert way is not None, "the part before has left it"
        at, end = way.bounds[part], way.bounds[part + 1]
        while at < end:
            index, first = divmod(at, length)
            last = min(length, first + end - at)
            self._compute(way, index, first, last)
            at += last - first
        if not self._order.end(item, part, num_parts):
            return None
        self._under_way = None
        return put_together(way.rows, item, self._newline)

    def _compute(self, way: _UnderWay, index: int, first: int, end: int) -> None:
        """Some of the instructions of a tile."""
        if first == 0:
            item = way.tiles[index]
            pixels = pixel_rows(item, self.config)
            if self._square is not None:
                pixels = with_positions(pixels, item, self.config, self._square)
            self._tile = _Tile(
                pixels, patch_places(item, self.config),
                windows_of(item, self.config),
            )  # fmt: skip
        tile = self._tile
        assert tile is not None, "its first instructions have left it"
        hidden = self._run(
            self._tower, tile.pixels, tile.places,
            None if tile.windows is None else tile.windows.starts, first=first, end=end,
        )  # fmt: skip
        if end == self._tower.program.num_instructions:
            program, kept = self._tower.program, self._tower.kept
            inside = [program.read(kept[name], len(tile.pixels)) for name in self._kept]
            rows = [
                self._run(projector, brought_together(values, self.config, tile.windows)).copy()
                for projector, values in zip(
                    (self._projector, *self._deep), (hidden, *inside), strict=True
                )
            ]
            way.rows.append(rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1))
            self._tile = None

    def _begin(self, item: MediaItem, num_parts: int) -> _UnderWay:
        config = self.config
        tiles = tiles_of(item, config)
        costs = op_costs(
            self._tower.ops, num_rows=num_patches(tiles[0], config),
            window_rows=config.vision.window**2,
        )  # fmt: skip
        num_instructions = self._tower.program.num_instructions
        if len(costs) != num_instructions:  # it has some that no model's page knows of
            costs = [1] * num_instructions
        return _UnderWay(tiles, part_bounds(costs * len(tiles), num_parts), [])

    def _run(
        self, compiled: CompiledProgram, inputs: NDArray[np.float32],
        places: NDArray[np.int32] | None = None, segments: NDArray[np.int32] | None = None,
        *, first: int = 0, end: int = -1,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Some of the instructions, all without `end`. Returns a view of the result, valid until
        the program runs again."""
        num_rows = len(inputs)
        ramp = np.arange(num_rows, dtype=np.int32)
        num_blocks = -(-num_rows // BLOCK_SIZE)
        compiled.program.run(
            self._kv,
            np.zeros(num_rows, np.int32),
            ramp,
            ramp[None],
            np.array([0, num_rows], np.int32),
            np.array([num_rows], np.int32),
            np.zeros(1, np.int32),
            np.arange(num_blocks, dtype=np.int32)[None, None],
            np.zeros(0, np.int32),
            input_rows=ramp,
            inputs=inputs,
            rope_positions=places,
            segment_starts=segments,
            first_instruction=first,
            end_instruction=end,
        )
        return compiled.program.read(compiled.logits, num_rows)


def _compiled(
    forward: Callable[[Recorder], Value], team: _native.Team, num_rows: int, *, is_fused: bool,
    keep: Sequence[str] = (),
) -> CompiledProgram:  # fmt: skip
    limits = BackendLimits(
        max_tokens=num_rows, max_seqs=1, max_logit_rows=1, max_model_len=num_rows
    )
    try:
        return compile_forward(forward, team, limits, is_fused=is_fused, keep=keep)
    except MemoryError as error:
        raise ConfigError(f"no memory for pictures of {num_rows} patches") from error
