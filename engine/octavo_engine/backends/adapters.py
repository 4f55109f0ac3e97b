"""Which parts of a LoRA adapter belong to which linear layers of a model, and whether they fit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.errors import ModelError
from octavo_engine.models.decoder_names import adapted_layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.models.config import ModelConfig
    from octavo_engine.weights.adapter import AdapterFiles
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


class StoredSitePart(NamedTuple):
    """What an adapter adds to one part of a site, as it lies in the file."""

    part: int
    down: StoredTensor  # [rank, columns]
    up: StoredTensor  # [size, rank]
    scale: float


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
) -> dict[int, list[StoredSitePart]]:
    """What the adapter adds to each site that is held, by its number. Raises ModelError that names
    the layer, be it held or not."""
    places = {
        name: (number, part)
        for number, site in enumerate(sites)
        for part, name in enumerate(site.names)
    }
    found: dict[int, list[StoredSitePart]] = defaultdict(list)
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
                up = replace(part.up, row_map=layer.row_map)
                found[number].append(StoredSitePart(index, part.down, up, part.scale))
    for parts in found.values():
        parts.sort(key=lambda each: each.part)
    return found


def in_float32(found: Mapping[int, Sequence[StoredSitePart]]) -> dict[int, list[SitePart]]:
    """For backends that do not read the file's own numbers."""
    return {
        number: [
            SitePart(one.part, to_float32(one.down), to_float32(one.up), one.scale) for one in parts
        ]
        for number, parts in found.items()
    }


def stored_rows(stored: StoredTensor) -> tuple[str, NDArray[np.uint8]]:
    """A matrix's dtype and the bytes of each row, in the file itself where its order is ours."""
    rows = stored.data.reshape(stored.shape[0], -1)
    return stored.dtype, rows if stored.row_map is None else rows[stored.row_map]


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
