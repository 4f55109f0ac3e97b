"""Models for embeddings and scores by transformers' own classes, where there is no page of ours.

Each text is computed alone, so that its bits do not depend on its company.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from octavo_engine.backends.torch.fallback.model import (
    DTYPES,
    check_architecture,
    first_line,
    read_config,
)
from octavo_engine.backends.torch.loader import TorchLoader
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.backends.torch.reference_pooling import ReferencePoolingOps
from octavo_engine.errors import ModelError
from octavo_engine.models.pooled import PooledModel
from octavo_engine.models.pooling_config import LibraryBody, is_classifier_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.pooling import PoolingStep
    from octavo_engine.config import EngineConfig
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.weights.checkpoint import Checkpoint
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)

_HINT = "the transformers fallback cannot serve it"


def read_body(config: EngineConfig, folder: Path, model: Mapping[str, Any]) -> LibraryBody:
    """From `model`, the config.json, and the class that it names; reads no weights. Raises
    ModelError."""
    settings = read_config(config, folder, model)
    is_classifier = is_classifier_class(model)
    check_architecture(settings, model, _auto_class(is_classifier).__name__)
    name = type(settings).__name__
    if not is_classifier and getattr(settings, "is_encoder_decoder", False):
        raise ModelError(f"{name} has an encoder and a decoder: {_HINT}")
    shape = {}
    for field in ("vocab_size", "hidden_size", "max_position_embeddings"):
        value = getattr(settings, field, None)
        if type(value) is not int or value < 1:
            raise ModelError(f"{name} does not say its {field}: {_HINT}")
        shape[field] = value
    with torch.device("meta"):
        empty = _from_config(config, settings, is_classifier=is_classifier)
    return LibraryBody(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        max_position_embeddings=min(shape["max_position_embeddings"], *_rows_for_tokens(empty)),
        num_types=max(1, _num_types(empty, settings)),
        is_encoder=type(settings) in AutoModelForMaskedLM._model_mapping,
    )


def _auto_class(is_classifier: bool) -> Any:  # published without types
    return AutoModelForSequenceClassification if is_classifier else AutoModel


def _from_config(
    config: EngineConfig, settings: Any, *, is_classifier: bool, **options: Any
) -> Any:
    try:
        return _auto_class(is_classifier).from_config(
            settings, trust_remote_code=config.trust_remote_code, **options
        )
    except Exception as error:  # the model's own code
        raise ModelError(f"transformers cannot make it: {first_line(error)}") from error


def _rows_for_tokens(model: Any) -> Iterable[int]:
    """Of tables of positions that begin behind a row for padding, as RoBERTa's: at least one of
    its result is there, to take the least of."""
    yield np.iinfo(np.int32).max
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and isinstance(module, torch.nn.Embedding)
            and module.padding_idx is not None
        ):
            yield module.num_embeddings - module.padding_idx - 1


def _num_types(model: Any, settings: Any) -> int:
    if "token_type_ids" not in inspect.signature(type(model).forward).parameters:
        return 1
    return int(getattr(settings, "type_vocab_size", None) or 1)


class TransformersTexts:
    """A PoolingBackend: the model, and the layers behind it that sentence-transformers wrote."""

    def __init__(
        self, config: EngineConfig, pooling: PoolingConfig, files: ModelFiles, modules: Checkpoint
    ) -> None:
        """Raises ModelError for what transformers cannot load, and for weights that are missing."""
        self.config = pooling
        self._device = torch.device("cuda" if config.device == "cuda" else "cpu")
        self._model: Any = self._load(config, files)
        self._takes_types = _num_types(self._model, self._model.config) > 1
        self._precision = Precision()
        loader = TorchLoader(modules, self._precision)
        self._pooled = PooledModel(pooling, loader, 0, body=_Body(self))
        logger.warning(
            "%s has no page here and is computed by transformers, one text at a time",
            type(self._model).__name__,
        )

    def _load(self, config: EngineConfig, files: ModelFiles) -> Any:
        settings = read_config(config, files.path, files.config)
        is_classifier = self.config.is_classifier
        dtype = DTYPES.get(config.dtype, "auto")
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            options = {} if dtype == "auto" else {"dtype": dtype}
            made = _from_config(config, settings, is_classifier=is_classifier, **options)
            return made.to(self._device).eval()
        try:
            model, info = _auto_class(is_classifier).from_pretrained(
                files.path, config=settings, local_files_only=True, use_safetensors=True,
                trust_remote_code=config.trust_remote_code, dtype=dtype, output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # it raises anything
            raise ModelError(
                f"{files.path}: transformers cannot load it: {first_line(error)}"
            ) from error
        # It would fill them at random. What follows the last hidden states is not used.
        lost = [name for name in info["missing_keys"] if is_classifier or "pooler" not in name]
        if lost:
            raise ModelError(
                f"{files.path}: there are no weights for {sorted(lost)[0]} of "
                f"{type(model).__name__}, and {len(lost) - 1} more"
            )
        return model.to(self._device).eval()

    @property
    def name(self) -> str:
        dtype = str(self._model.dtype).removeprefix("torch.")
        return f"transformers/{self._device.type}/{dtype}"

    def prepare(self, *, max_tokens: int, max_texts: int) -> None:
        """Nothing is planned here."""

    def pool(self, step: PoolingStep) -> NDArray[np.float32]:
        with torch.inference_mode():
            ops = ReferencePoolingOps(step, self._precision)
            if self.config.is_classifier:
                rows = torch.cat([self._answer(*text).logits.float().cpu() for text in ops.texts()])
            else:
                rows = self._pooled.forward(ops)
            return np.ascontiguousarray(rows.float().numpy())

    def token_rows(self, step: PoolingStep) -> NDArray[np.float32]:
        with torch.inference_mode():
            rows = self._pooled.forward_tokens(ReferencePoolingOps(step, self._precision))
            return np.ascontiguousarray(rows.float().numpy())

    def hidden_states(self, tokens: Tensor, types: Tensor) -> Tensor:
        """[tokens, hidden] of a text, in float32 on the CPU."""
        states: Tensor = self._answer(tokens, types).last_hidden_state
        return states[0].float().cpu()

    def close(self) -> None:
        self._model = None

    def _answer(self, tokens: Tensor, types: Tensor) -> Any:
        assert self._model is not None, "the backend was closed"
        ids = tokens[None].to(self._device)
        more = {"token_type_ids": types[None].to(self._device)} if self._takes_types else {}
        return self._model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)


class _Body:
    """As PooledModel takes one."""

    def __init__(self, texts: TransformersTexts) -> None:
        self._texts = texts

    def forward(self, ops: Any) -> Any:
        return torch.cat([self._texts.hidden_states(*text) for text in ops.texts()])
