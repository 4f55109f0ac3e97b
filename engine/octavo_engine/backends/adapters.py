"""Which parts of a LoRA adapter belong to which linear layers of a model, and whether they fit."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.errors import ModelError
from octavo_engine.models.decoder_names import adapted_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.models.config import ModelConfig
    from octavo_engine.weights.adapter import AdapterFiles, AdapterPart
    from octavo_engine.weights.checkpoint import StoredTensor


class AdapterLimits(NamedTuple):
    """What a backend must have room for."""

    num_slots: int
    max_rank: int


class AdapterSite(NamedTuple):
    """A linear layer that adapters may add to, stacked from parts with names of their own."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # outputs of each
    columns: int
    is_held: bool = True  # False: another stage computes the layer


class SitePart(NamedTuple):
    """What an adapter adds to one part of a site: scale * up · (down · x)."""

    part: int
    down: NDArray[np.float32]  # [rank, columns]
    up: NDArray[np.float32]  # [size, rank]
    scale: float


def is_adaptable(names: Sequence[str]) -> bool:
    """The head is not: it shares its matrix with the embedding where they are tied."""
    return list(names) != ["lm_head"]


def match_sites(
    files: AdapterFiles, config: ModelConfig, sites: Sequence[AdapterSite]
) -> dict[int, list[SitePart]]:
    """What the adapter adds to each site that is held, by its number. Raises ModelError that names
    the layer, be it held or not."""
    places = {
        name: (number, part)
        for number, site in enumerate(sites)
        for part, name in enumerate(site.names)
    }
    found: dict[int, list[SitePart]] = defaultdict(list)
    for module, part in files.parts.items():
        for layer in adapted_layers(config, module):
            if layer.name not in places:
                raise ModelError(f"{files.path}: {_why_not(module, layer.name, places)}")
            number, index = places[layer.name]
            site = sites[number]
            num_rows = site.sizes[index] if layer.num_rows is None else layer.num_rows
            wanted = (part.rank, site.columns), (num_rows, part.rank)
            if (part.down.shape, part.up.shape) != wanted:
                raise ModelError(
                    f"{files.path}: {module} has lora_A of {list(part.down.shape)} and lora_B of "
                    f"{list(part.up.shape)}; this model's layer takes {list(wanted[0])} and "
                    f"{list(wanted[1])}: the adapter is of another model"
                )
            if site.is_held:
                found[number].append(_numbers(index, part, layer.row_map))
    for parts in found.values():
        parts.sort(key=lambda each: each.part)
    return found


def _numbers(index: int, part: AdapterPart, row_map: NDArray[np.int32] | None) -> SitePart:
    up = _matrix(part.up)
    return SitePart(index, _matrix(part.down), up if row_map is None else up[row_map], part.scale)


def _matrix(stored: StoredTensor) -> NDArray[np.float32]:
    """In the file itself where it holds such numbers."""
    if stored.dtype == "F32" and stored.data.ctypes.data % 4 == 0:
        return stored.data.view(np.float32).reshape(stored.shape)
    return np.ascontiguousarray(to_float32(stored).reshape(stored.shape))


def _why_not(module: str, ours: str, places: dict[str, tuple[int, int]]) -> str:
    last = ours.rpartition(".")[2]
    if ".experts." in ours or last == "experts":
        return (
            f"{module} is an expert; adapters of experts are not computed: train one of the "
            "attention's layers, or merge it into the model"
        )
    if last in ("lm_head", "embed_tokens"):
        return (
            f"{module} is the embedding or the head; adapters of those are not computed: merge "
            "it into the model"
        )
    known = sorted({name.rpartition(".")[2] for name in places})
    return f"the model has no linear layer {module}; its layers end in {', '.join(known)}"
