"""From the settings to the weights of heads that draft."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from octavo_engine.backends.draft_files import check_draft_device
from octavo_engine.backends.spread import spread
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.medusa import MedusaConfig, MedusaHeads
from octavo_engine.models.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.safetensors import SafetensorsCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from octavo_engine.config import EngineConfig, Quantization
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import DraftOps, Loader, Value
    from octavo_engine.weights.checkpoint import Checkpoint

_PREFIX = "medusa_heads."  # of some checkpoints


class HeadsPart(NamedTuple):
    """What a backend loads heads from."""

    config: MedusaConfig | MlpSpeculatorConfig
    checkpoint: Checkpoint
    num_heads: int  # the first ones of them
    token_ids: NDArray[np.int32] | None = None  # that a head has logits for; None: all
    quantization: Quantization = "auto"

    def spread(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits over the model's vocabulary: what a head does not know, it does not draft."""
        return spread(logits, self.token_ids, self.config.vocab_size)


class Heads(Protocol):
    """Heads without layers of their own."""

    @property
    def num_heads(self) -> int: ...

    def forward(self, ops: DraftOps, head: int) -> Value:
        """One head's logits of the states and tokens that the step brings. It keeps STATE, if the
        next head has another than it."""


def build_heads(part: HeadsPart, loader: Loader) -> Heads:
    """The caller ends with `loader.finish()`."""
    if isinstance(part.config, MlpSpeculatorConfig):
        return MlpSpeculator(part.config, loader, part.num_heads)
    return MedusaHeads(part.config, loader, part.num_heads)


def open_heads(config: EngineConfig, model: ModelConfig) -> HeadsPart | None:
    """The heads that the settings name, if any. Raises ConfigError where they do not fit the model,
    and ModelError."""
    speculation = config.heads
    if speculation is None:
        return None
    from octavo_engine.weights.source import resolve_model

    check_draft_device(config)
    files = resolve_model(
        speculation.model, revision=speculation.revision, download_dir=config.download_dir
    )
    is_speculator = speculation.method == "mlp_speculator"
    kind = MlpSpeculatorConfig if is_speculator else MedusaConfig
    heads = kind.from_hf(files.config)
    for name, own, models in (
        ("hidden_size", heads.hidden_size, model.hidden_size),
        ("vocab_size", heads.vocab_size, model.vocab_size),
    ):
        if own != models:
            raise ConfigError(
                f"--speculative-config: the heads {speculation.model} are of another model: their "
                f"{name} is {own} and the model's {models}"
            )
    checkpoint = open_checkpoint(files, seed=config.seed)
    num_heads = min(heads.num_heads, speculation.num_speculative_tokens)
    if isinstance(heads, MlpSpeculatorConfig):
        names = SpeculatorNames(checkpoint, heads, num_heads)
        return HeadsPart(heads, names, num_heads, None, speculation.quantization)
    token_ids = None
    if heads.num_tokens < heads.vocab_size:
        token_ids = _token_map(checkpoint, heads)
    return HeadsPart(
        heads,
        HeadNames(checkpoint, heads, num_heads, token_ids),
        num_heads,
        token_ids,
        speculation.quantization,
    )


def _token_map(checkpoint: Checkpoint, config: MedusaConfig) -> NDArray[np.int32]:
    """Raises ModelError."""
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise ModelError("heads with truncated_vocab_size must be stored as safetensors")
    names = [name for name in checkpoint.names() if name.removeprefix(_PREFIX) == "token_map"]
    if not names:
        raise ModelError("the heads have truncated_vocab_size, but no tensor token_map")
    ids = checkpoint.array(names[0], ("I64", "I32"), 1)
    is_valid = (
        len(ids) == config.num_tokens
        and len(np.unique(ids)) == len(ids)
        and ids.min() >= 0
        and ids.max() < config.vocab_size
    )
    if not is_valid:
        raise ModelError(
            f"token_map of the heads must be {config.num_tokens} different tokens below "
            f"{config.vocab_size}"
        )
    return ids.astype(np.int32)


class HeadNames:
    """A checkpoint of heads under the names of `MedusaHeads`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: MedusaConfig,
        num_heads: int,
        token_ids: NDArray[np.int32] | None,
    ) -> None:
        self._checkpoint = checkpoint
        stored = {name.removeprefix(_PREFIX): name for name in checkpoint.names()}
        if config.shares_output and "lm_heads.0.weight" in stored:
            stored["lm_head.weight"] = stored.pop("lm_heads.0.weight")
        self._stored = {own: name for own, name in stored.items() if _is_of(own, num_heads)}
        self._config = config
        self._token_ids = token_ids

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._stored[name]
        is_output = self._token_ids is not None and name.startswith("lm_head")
        if is_output and isinstance(self._checkpoint, SafetensorsCheckpoint):
            whole = (self._config.vocab_size, self._config.hidden_size)
            if self._checkpoint.entry(stored).shape == whole:
                tensor = self._checkpoint.read(stored, whole)
                rows = tensor.data.reshape(self._config.vocab_size, -1)[self._token_ids]
                return dataclasses.replace(tensor, shape=tuple(shape), data=rows.reshape(-1))
        return self._checkpoint.read(stored, shape)

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes


class SpeculatorNames:
    """A checkpoint of a speculator under the names of `MlpSpeculator`."""

    def __init__(self, checkpoint: Checkpoint, config: MlpSpeculatorConfig, num_heads: int) -> None:
        self._checkpoint = checkpoint
        self._stored: dict[str, str] = {}
        for name in checkpoint.names():
            own = name.removeprefix("speculator.")
            index = re.match(r"(emb|head|ln|proj)\.(\d+)\.", own)
            place = config.projection if index and index[1] == "proj" else config.place
            if index is None or place(int(index[2])) != int(index[2]):
                continue  # one that is stored with each head that shares it
            if int(index[2]) < num_heads:
                self._stored[_BIAS.sub(r"\1.bias_row.weight", own)] = name

    def names(self) -> Iterable[str]:
        return [*self._stored, _INPUT_NORM]

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name == _INPUT_NORM:  # what it is divided by, besides its length
            data = np.full(shape, 0.5**0.5, np.float32).view(np.uint8)
            return StoredTensor(name, "F32", tuple(shape), data)
        if name.endswith(".bias_row.weight"):
            stored = self._checkpoint.read(self._stored[name], shape[1:])
            return dataclasses.replace(stored, name=name, shape=tuple(shape))
        return self._checkpoint.read(self._stored[name], shape)

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes


_BIAS = re.compile(r"^(ln\.\d+)\.bias$")
_INPUT_NORM = "ln0.weight"


def _is_of(name: str, num_heads: int) -> bool:
    """Whether a tensor is of the first heads, or of all."""
    head = re.match(r"(?:blocks|lm_heads)\.(\d+)\.", name)
    return name != "token_map" and (head is None or int(head[1]) < num_heads)
