"""The catalogue: short names of models, with the address, size, memory and licence of each."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

_SHARE = 0.8  # of free memory
CHAT, EMBEDDING = "chat", "embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One short name. Sizes are in MB, of 10**6 bytes."""

    name: str
    uri: str
    kind: str  # chat, embedding
    parameters: str
    download: int
    memory: int  # of the process, with a KV cache for one chat
    context: int
    license: str
    is_gated: bool = False  # the hub gives it only to accounts that have accepted its licence
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def needs_hub(self) -> bool:
        """Whether it comes from the Hub; the others come from the package index."""
        return self.uri.startswith("hf://")


@cache
def catalogue() -> tuple[CatalogueModel, ...]:
    text = files("octavo.models").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return tuple(
        CatalogueModel(**{**fields, "aliases": tuple(fields.get("aliases", ()))})
        for fields in tomllib.loads(text)["model"]
    )


def find_model(name: str) -> CatalogueModel | None:
    """By name or alias, in any case."""
    lower = name.lower()
    return next((model for model in catalogue() if lower in model.names), None)


def unknown_name(text: str) -> str:
    """The start of a sentence about a name that no model of the catalogue has."""
    names = [name for model in catalogue() for name in model.names]
    near = get_close_matches(text.lower(), names, 1)
    hint = f"did you mean {near[0]}?" if near else "octavo list --all shows what is"
    return f"{text:.200} is not in the catalogue ({hint}), and is neither"


def fitting_models(free_bytes: int, kind: str = CHAT) -> list[CatalogueModel]:
    """Those that leave a part of this memory to others and need no account, the largest first."""
    room = free_bytes * _SHARE
    models = [model for model in catalogue() if model.kind == kind and not model.is_gated]
    found = [model for model in models if model.memory * 10**6 <= room]
    return sorted(found, key=lambda model: model.memory, reverse=True)
