"""LoRA adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.config import MAX_LORA_RANK
from octavo_engine.errors import ModelError
from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.json_file import read_json_object
from octavo_engine.weights.safetensors import READABLE, SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_QUARTERS = 4

# What changes the arithmetic and is not computed here: the field, what it is, and what helps.
_MERGE = "merge the adapter into the model, or train it without"
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of its own",
    "modules_to_save": "whole modules beside LoRA",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "parameters of experts",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
}
_TENSOR = re.compile(r"^(.+)\.lora_([AB])(?:\.default)?\.weight$")
_PREFIX = "base_model.model."
# What models of several parts call the part that speaks; a model is served by that part alone.
_TEXT_PARTS = (("model.language_model.", "model."), ("language_model.model.", "model."))
_PLAIN_PATTERN = re.compile(r"^[\w.]+$")


class AdapterMissing(ModelError):
    """There is no adapter at the path."""


class AdapterPart(NamedTuple):
    """What an adapter adds to one linear layer: scale * up · (down · x)."""

    down: StoredTensor  # A, [rank, in]
    up: StoredTensor  # B, [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class AdapterContent:
    """What an adapter is distinguished by, while threads still hash its weights.

    By sha256, for which processors have instructions: all of the weights are read, in quarters that
    threads share. Half of the processors are left to what parses and packs meanwhile.
    """

    def __init__(self, file: SafetensorsFile, scaling: _Scaling) -> None:
        self._file = file
        self._scaling = scaling
        size = len(file.body) // _QUARTERS + 1
        quarters = [file.body[i * size : (i + 1) * size] for i in range(_QUARTERS)]
        num_threads = min(_QUARTERS, max(1, (os.cpu_count() or 1) // 2))
        pool = ThreadPoolExecutor(num_threads, "octavo-adapter-hash")
        self._quarters = [pool.submit(_hash, quarter) for quarter in quarters]
        pool.shutdown(wait=False)

    @cached_property
    def digest(self) -> str:
        scaling = self._scaling
        settings = [scaling.rank, scaling.alpha, scaling.is_rslora, [*scaling.ranks.items()],
                    [*scaling.alphas.items()]]  # fmt: skip
        entries = [
            [name, entry.dtype, entry.shape, entry.begin, entry.end]
            for name, entry in sorted(self._file.entries.items())
        ]
        digest = hashlib.sha256(json.dumps([settings, entries]).encode() + b"\0")
        for quarter in self._quarters:
            digest.update(quarter.result())
        return digest.hexdigest()[:32]


def _hash(data: NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(data.data).digest()


class AdapterFiles(NamedTuple):
    """An adapter, mapped. Layers have the names that they have in the model's checkpoint."""

    path: Path
    content: AdapterContent
    parts: dict[str, AdapterPart]

    @property
    def digest(self) -> str:
        """Of all that its arithmetic depends on: settings and weights. Waits until it is known:
        weights are hashed while they are packed."""
        return self.content.digest

    @property
    def rank(self) -> int:
        return max(part.rank for part in self.parts.values())


class _Scaling(NamedTuple):
    """How PEFT weighs the layers of an adapter."""

    rank: int
    alpha: float
    is_rslora: bool
    ranks: Mapping[str, int]  # of layers whose name ends so
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), float(_matching(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rslora else rank)


def read_adapter(path: str, *, max_rank: int = MAX_LORA_RANK) -> AdapterFiles:
    """Raises AdapterMissing, or a ModelError that names the field or tensor and what to do."""
    folder = Path(path)
    try:
        is_there = (folder / CONFIG_NAME).is_file()
    except (OSError, ValueError):  # too long, or a NUL within
        is_there = False
    if not is_there:
        raise AdapterMissing(f"{path} is no folder of a LoRA adapter: it has no {CONFIG_NAME}")
    config = folder / CONFIG_NAME
    scaling = _read_config(config, read_json_object(config), max_rank)
    weights = folder / WEIGHTS_NAME
    if not weights.is_file():
        raise ModelError(
            f"{folder} has no {WEIGHTS_NAME}; adapters are read as safetensors only "
            "(peft: model.save_pretrained(FOLDER, safe_serialization=True))"
        )
    file = SafetensorsFile(weights)
    content = AdapterContent(file, scaling)
    return AdapterFiles(folder, content, _parts(file, scaling))


def _read_config(path: Path, fields: dict[str, Any], max_rank: int) -> _Scaling:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type is {kind!r:.40}; only LORA adapters are computed")
    for field, what in _REFUSED.items():
        if fields.get(field):
            raise ModelError(f"{path}: {field}: adapters with {what} are not computed; {_MERGE}")
    if fields.get("bias", "none") not in ("none", None):
        raise ModelError(
            f"{path}: bias is {fields['bias']!r:.40}; only adapters with bias none are computed; "
            f"{_MERGE}"
        )
    rank = _rank(path, "r", fields.get("r"), max_rank)
    ranks = {
        pattern: _rank(path, f"rank_pattern of {pattern}", value, max_rank)
        for pattern, value in _patterns(path, fields, "rank_pattern").items()
    }
    alphas = {
        pattern: _number(path, f"alpha_pattern of {pattern}", value)
        for pattern, value in _patterns(path, fields, "alpha_pattern").items()
    }
    is_rslora = fields.get("use_rslora", False)
    if not isinstance(is_rslora, bool):
        raise ModelError(f"{path}: use_rslora must be true or false; got {is_rslora!r:.40}")
    alpha = _number(path, "lora_alpha", fields.get("lora_alpha"))
    return _Scaling(rank, alpha, is_rslora, ranks, alphas)


def _rank(path: Path, name: str, value: object, max_rank: int) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{path}: {name} must be a whole number above 0; got {value!r:.40}")
    if value > max_rank:
        raise ModelError(
            f"{path}: {name} is {value}, above --max-lora-rank {max_rank}; start the server with a "
            f"higher one, up to {MAX_LORA_RANK}"
        )
    return value


def _number(path: Path, name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -1e30 < value < 1e30:  # type: ignore[operator]  # a number by now
        raise ModelError(f"{path}: {name} must be a number; got {value!r:.40}")
    return float(value)  # type: ignore[arg-type]


def _patterns(path: Path, fields: dict[str, Any], name: str) -> dict[str, Any]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{path}: {name} must be an object; got {patterns!r:.40}")
    for pattern in patterns:
        if not _PLAIN_PATTERN.match(pattern):
            raise ModelError(
                f"{path}: {name} has the regular expression {pattern!r:.60}; only names of modules "
                "or their ends are understood: write the names out"
            )
    return patterns


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that is the name or its end, as PEFT looks them up."""
    for pattern, value in patterns.items():
        if module == pattern or module.endswith(f".{pattern}"):
            return value
    return default


def _parts(file: SafetensorsFile, scaling: _Scaling) -> dict[str, AdapterPart]:
    halves: dict[str, dict[str, StoredTensor]] = {}
    modules: dict[str, str] = {}  # as the adapter calls them, by the checkpoint's name
    for name, entry in file.entries.items():
        match = _TENSOR.match(name)
        if match is None:
            raise ModelError(
                f"tensor {name} in {file.path} is no part of a LoRA adapter of linear layers; "
                f"{_MERGE}"
            )
        if entry.dtype not in READABLE:
            raise ModelError(
                f"tensor {name} in {file.path} has dtype {entry.dtype}; "
                f"readable are {', '.join(READABLE)}"
            )
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise ModelError(
                f"tensor {name} in {file.path} has shape {list(entry.shape)}; a matrix is needed"
            )
        own = match[1].removeprefix(_PREFIX)
        module = _checkpoint_name(own)
        modules[module] = own
        pair = halves.setdefault(module, {})
        if match[2] in pair:
            raise ModelError(f"{file.path} has lora_{match[2]} of {module} twice")
        pair[match[2]] = StoredTensor(name, entry.dtype, entry.shape, file.data(name))
    if not halves:
        raise ModelError(f"{file.path} holds no tensors")
    return {
        module: _part(file.path, module, pair, scaling, modules[module])
        for module, pair in sorted(halves.items())
    }


def _part(
    path: Path, module: str, pair: dict[str, StoredTensor], scaling: _Scaling, own: str
) -> AdapterPart:
    for half in "AB":
        if half not in pair:
            raise ModelError(f"{path} has no lora_{half} of {module}")
    down, up, rank = pair["A"], pair["B"], scaling.rank_of(own)
    if down.shape[0] != rank or up.shape[1] != rank:
        raise ModelError(
            f"{path}: {module} has lora_A of {list(down.shape)} and lora_B of {list(up.shape)}; "
            f"by {CONFIG_NAME} their rank is {rank}"
        )
    return AdapterPart(down, up, scaling.scale_of(own))


def _checkpoint_name(module: str) -> str:
    for prefix, served in _TEXT_PARTS:
        if module.startswith(prefix):
            return served + module.removeprefix(prefix)
    return module
