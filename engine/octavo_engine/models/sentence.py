"""What sentence-transformers' files beside a model say: pooling, dense layers, prompts, length."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from octavo_engine.errors import ModelError
from octavo_engine.models.config import MAX_WIDTH
from octavo_engine.models.fields import ConfigFields
from octavo_engine.models.rope_config import MAX_POSITIONS
from octavo_engine.ops import Pool
from octavo_engine.weights.json_file import read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from octavo_engine.ops import Activation

Pooling: TypeAlias = Literal["cls", "last"] | Pool

_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_NEW_POOLINGS: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
_ACTIVATIONS: dict[str, Activation | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
MAX_MODULES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """One linear layer behind the pooling, with what follows it."""

    name: str  # of its weights
    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation | None = None
    is_normed: bool = False  # by a layer norm of its own, after the activation


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModules:
    """A chain of modules, as sentence-transformers runs it."""

    pooling: Pooling
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    is_per_token: bool = False  # a vector for each token, which are compared by their best match
    is_sparse: bool = False  # a weight for each word of the vocabulary
    max_length: int | None = None  # tokens, special ones included
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """None where there is no modules.json. Raises ModelError that names the file and field."""
    file = folder / "modules.json"
    if not file.is_file():
        return None
    pooling: Pooling | None = None
    dense: list[DenseConfig] = []
    normalize = is_sparse = False
    own = _optional(folder, "sentence_bert_config.json")
    more = _optional(folder, "config_sentence_transformers.json")
    is_per_token = more.optional_text("similarity_fn_name") == "MaxSim"
    for kind, path in _modules(file):
        match kind:
            case "Transformer" | "MLMTransformer":
                is_sparse = kind == "MLMTransformer"
                if path:
                    raise ModelError(f"{file}: the transformer must lie in the folder itself")
            case "Pooling":
                pooling = _pooling(_fields(folder, path))
            case "Dense":
                dense.append(_dense(_fields(folder, path), path))
            case "SpladePooling":
                pooling = _sparse_pooling(_fields(folder, path))
            case "Normalize":
                normalize = True
            case "Dropout":
                pass  # of training
            case _:
                raise ModelError(f"{file}: modules of type {kind} are not supported")
    if is_per_token and pooling is None:
        pooling, normalize = "cls", True
    if pooling is None:
        raise ModelError(f"{file}: there is no module of type Pooling; the model gives no vectors")
    prompts = more.raw("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(v, str) for v in prompts.values()):
        raise more.error("prompts", "must be an object of texts")
    if is_per_token:
        markers = {"query": "query_prefix", "document": "document_prefix"}
        given = {kind: more.optional_text(name) for kind, name in markers.items()}
        prompts = {**prompts, **{kind: text for kind, text in given.items() if text}}
    default = more.optional_text("default_prompt_name")
    if default is not None and default not in prompts:
        raise more.error("default_prompt_name", "must be one of the prompts")
    return SentenceModules(
        pooling=pooling,
        dense=tuple(dense),
        normalize=normalize,
        is_per_token=is_per_token,
        is_sparse=is_sparse,
        max_length=own.optional_integer("max_seq_length", maximum=MAX_POSITIONS),
        prompts=prompts,
        default_prompt=default,
        similarity=more.optional_text("similarity_fn_name") or "cosine",
    )


def _modules(file: Path) -> list[tuple[str, str]]:
    """(type, folder) of each module, in their order."""
    try:
        modules: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(modules, list) or not 1 <= len(modules) <= MAX_MODULES:
        raise ModelError(f"{file} must be a list of 1 to {MAX_MODULES} modules")
    found = []
    for module in modules:
        kind = module.get("type") if isinstance(module, dict) else None
        path = module.get("path", "") if isinstance(module, dict) else None
        plain = isinstance(path, str) and not any(c in path for c in "\\\0") and ".." not in path
        if not isinstance(kind, str) or not plain or str(path).startswith("/"):
            raise ModelError(f"{file}: a module needs a type and a path within the folder")
        found.append((kind.rpartition(".")[2], str(path)))
    return found


def _fields(folder: Path, path: str) -> ConfigFields:
    file = folder / path / "config.json"
    return ConfigFields(read_json_object(file), path=str(file))


def _optional(folder: Path, name: str) -> ConfigFields:
    file = folder / name
    return ConfigFields(read_json_object(file) if file.is_file() else {}, path=name)


def _pooling(fields: ConfigFields) -> Pooling:
    given = fields.raw("pooling_mode")
    if given is not None:
        modes = given if isinstance(given, list) else [given]
        unknown = [mode for mode in modes if mode not in _NEW_POOLINGS]
        if unknown:
            raise fields.error("pooling_mode", f"must be one of {', '.join(_NEW_POOLINGS)}")
        found = [_NEW_POOLINGS[mode] for mode in modes]
    else:
        found = [pooling for name, pooling in _POOLINGS.items() if fields.boolean(name)]
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise ModelError(f"{fields.path}: exactly one pooling mode is supported; got {names}")
    if fields.raw("include_prompt") is False:
        raise fields.error("include_prompt", "must be true: prompts are pooled like all else")
    return found[0]


def _sparse_pooling(fields: ConfigFields) -> Pooling:
    if fields.raw("pooling_strategy") not in (None, "max"):
        raise fields.error("pooling_strategy", "must be max")
    if fields.raw("activation_function") not in (None, "relu"):
        raise fields.error("activation_function", "must be relu")
    return "max"


def _dense(fields: ConfigFields, path: str) -> DenseConfig:
    name = (fields.optional_text("activation_function") or "Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise fields.error("activation_function", f"must be one of {', '.join(_ACTIVATIONS)}")
    return DenseConfig(
        name=f"{path}.linear",
        in_features=fields.integer("in_features", maximum=MAX_WIDTH),
        out_features=fields.integer("out_features", maximum=MAX_WIDTH),
        bias=fields.raw("bias") is None or fields.boolean("bias"),
        activation=_ACTIVATIONS[name],
    )
