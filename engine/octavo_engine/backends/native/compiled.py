"""From a model's forward pass to the program that csrc runs: recorded, fused, settled, emitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.native.emit import CachePlaces, compile_graph
from octavo_engine.backends.native.fusion import fuse, settle_dtypes
from octavo_engine.backends.native.recorder import record

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from octavo_engine import _native
    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.native.emit import CompiledProgram
    from octavo_engine.backends.native.graph import Graph, Value
    from octavo_engine.backends.native.recorder import Recorder


def compile_forward(
    forward: Callable[[Recorder], Value],
    team: _native.Team,
    limits: BackendLimits,
    *,
    places: CachePlaces | None = None,
    is_fused: bool,
    joins_phases: bool = True,
    activation_bits: int = 16,
    ranks: _native.Ranks | None = None,
    peers: _native.Ranks | None = None,
    keep: Collection[str] = (),
    cut: Callable[[Graph], Graph] | None = None,
) -> CompiledProgram:
    """`places` of the layers' caches; `keep` names what is read beside the logits, or where `cut`
    takes its part of the pass.

    Raises MemoryError where steps of this size have no room.
    """
    graph = record(forward, keep)
    graph = graph if cut is None else cut(graph)
    graph = fuse(graph) if is_fused else graph
    settled = settle_dtypes(graph, elide=is_fused)
    places = places or CachePlaces()
    return compile_graph(
        settled, team, limits, places, activation_bits, ranks, peers, joins_phases=joins_phases
    )
