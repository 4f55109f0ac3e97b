"""From a model's forward pass to the program that csrc runs: recorded, fused, settled, emitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.native.emit import compile_graph
from octavo_engine.backends.native.fusion import fuse, settle_dtypes
from octavo_engine.backends.native.recorder import record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine import _native
    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.native.emit import CompiledProgram
    from octavo_engine.backends.native.graph import Value
    from octavo_engine.backends.native.recorder import Recorder


def compile_forward(
    forward: Callable[[Recorder], Value],
    team: _native.Team,
    limits: BackendLimits,
    *,
    groups: Sequence[int] = (0,),
    is_fused: bool,
    activation_bits: int = 16,
    ranks: _native.Ranks | None = None,
) -> CompiledProgram:
    """`groups`: of each layer, whose block tables it reads. Raises MemoryError where steps of this
    size have no room."""
    graph = record(forward)
    graph = fuse(graph) if is_fused else graph
    settled = settle_dtypes(graph, elide=is_fused)
    return compile_graph(settled, team, limits, groups, activation_bits, ranks)
