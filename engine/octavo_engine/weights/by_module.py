"""Checkpoints whose modules are quantised in several ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.weights.layouts import Layout
    from octavo_engine.weights.safetensors import SafetensorsCheckpoint


class ByModule(NamedTuple):
    """Several layouts, and which one a module has by its name."""

    layouts: tuple[Layout, ...]
    find: Callable[[str], Layout | None]

    def find_all(self, checkpoint: SafetensorsCheckpoint) -> dict[str, Layout]:
        """Of each module that has quantised values; the others were left as they are."""
        names = frozenset(checkpoint.names())
        stored = {layout: modules_of(layout, names) for layout in self.layouts}
        found = {}
        for module in set().union(*stored.values()):
            layout = self.find(module)
            if layout is None or module not in stored[layout]:
                raise ModelError(
                    f"config.json: quantization_config does not say how {module} is quantised, "
                    "though its values are"
                )
            found[module] = layout
        return found


def modules_of(layout: Layout, names: frozenset[str]) -> set[str]:
    """Those whose values are stored in this layout."""
    suffix = layout.suffix
    modules = {name.removesuffix(suffix) for name in names if name.endswith(suffix)}
    if suffix == ".weight":  # as for matrices that were left alone
        modules = {module for module in modules if module + layout.scale in names}
    return modules
