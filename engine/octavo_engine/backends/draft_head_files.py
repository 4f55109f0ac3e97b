"""From the settings to the weights of a head that drafts with layers of its own."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo_engine.backends.draft_files import check_draft_device, open_weights
from octavo_engine.backends.draft_part import DraftHeadPart
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.config import MAX_LAYERS, MAX_VOCABULARY, ModelConfig
from octavo_engine.models.draft_head import DraftHeadConfig
from octavo_engine.models.fields import ConfigFields
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.safetensors import SafetensorsCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from octavo_engine.config import EngineConfig, SpeculationConfig
    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor
    from octavo_engine.weights.source import ModelFiles

_FLAG = "--speculative-config"
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of dtypes whose columns can be taken apart


def open_draft_head(
    config: EngineConfig, model: ModelConfig, files: ModelFiles
) -> DraftHeadPart | None:
    """The head that the settings name, if any; `files` are the model's. Raises ConfigError where it
    does not fit the model, and ModelError."""
    speculation = config.draft_head
    if speculation is None:
        return None
    check_draft_device(config)
    _check_model(model)
    if speculation.method == "mtp":
        return _prediction_layer(config, model, files, speculation)
    from octavo_engine.weights.source import resolve_model

    found = resolve_model(
        speculation.model, revision=speculation.revision, download_dir=config.download_dir
    )
    checkpoint = open_checkpoint(found, seed=config.seed)
    is_third = speculation.method == "eagle3"
    read = read_eagle3 if is_third else read_eagle
    head = read(found.config, list(checkpoint.names()), model)
    token_ids = None
    if head.num_tokens < model.vocab_size:
        token_ids = _draft_tokens(checkpoint, head)
    names = HeadWeights(checkpoint, eagle_places(checkpoint.names(), is_third=is_third))
    return DraftHeadPart(head, names, token_ids, speculation.quantization)


def _check_model(model: ModelConfig) -> None:
    """Raises ConfigError where no head can draft for it."""
    if model.family.page not in ("llama", "gemma", "gpt", "hybrid"):
        raise ConfigError(
            f"{_FLAG}: no draft head is computed for {model.architecture}; use the method ngram"
        )


def read_eagle(
    values: Mapping[str, Any], names: Iterable[str], model: ModelConfig
) -> DraftHeadConfig:
    """Raises ConfigError where the head is of another model, and ModelError."""
    stored = set(map(_plain, names))
    fields = ConfigFields(_inner(values))
    layers = _layers_of(fields, stored, values)
    for name, own, models in (
        ("hidden_size", layers.hidden_size, model.hidden_size),
        ("vocab_size", layers.vocab_size, model.vocab_size),
    ):
        _check_same(name, own, models)
    return DraftHeadConfig(
        kind="eagle",
        layers=layers,
        model=model,
        kept=(model.num_layers,),
        num_tokens=model.vocab_size,
        has_fc_bias="fc.bias" in stored,
        has_input_norms="embedding_layernorm.weight" in stored,
    )


def read_eagle3(
    values: Mapping[str, Any], names: Iterable[str], model: ModelConfig
) -> DraftHeadConfig:
    """Raises ConfigError where the head is of another model, and ModelError."""
    stored = set(map(_plain, names))
    fields = ConfigFields(_inner(values))
    layers = _layers_of(fields, stored, values)
    _check_same("vocab_size", layers.vocab_size, model.vocab_size)
    target = fields.optional_integer("target_hidden_size", maximum=1 << 20)
    _check_same("target_hidden_size", target or layers.hidden_size, model.hidden_size)
    has_own_embedding = "embed_tokens.weight" in stored
    if layers.hidden_size != model.hidden_size and not has_own_embedding:
        raise ModelError(
            "the head has another hidden_size than the model, and no tensor embed_tokens.weight"
        )
    draft_vocab = fields.optional_integer("draft_vocab_size", maximum=MAX_VOCABULARY)
    num_tokens = min(draft_vocab or model.vocab_size, model.vocab_size)
    has_own_output = "lm_head.weight" in stored
    if num_tokens < model.vocab_size and not has_own_output:
        raise ModelError("the head has a draft_vocab_size, but no tensor lm_head.weight")
    section = fields.section("eagle_config")
    if section is not None and section.raw("use_aux_hidden_state") is False:
        raise ConfigError(
            f"{_FLAG}: a head of eagle3 with use_aux_hidden_state false is not supported; name one "
            "that takes the states of several layers"
        )
    return DraftHeadConfig(
        kind="eagle3",
        layers=layers,
        model=model,
        kept=_kept(fields, section, model),
        num_tokens=num_tokens,
        has_fc_bias="fc.bias" in stored,
        has_own_embedding=has_own_embedding,
        has_own_output=has_own_output,
        norms_residual=fields.boolean("norm_before_residual"),
    )


def _kept(
    fields: ConfigFields, section: ConfigFields | None, model: ModelConfig
) -> tuple[int, ...]:
    """Behind how many layers the head takes states: as the file says, else as in the paper's
    code."""
    name = "eagle_aux_hidden_state_layer_ids"
    given = fields.integers(name, maximum=MAX_LAYERS)
    if not given and section is not None:
        given = section.integers(name, maximum=MAX_LAYERS)
    count = model.num_layers
    kept = given or (2, count // 2, count - 3)
    if min(kept) < 1 or max(kept) > count:
        raise ConfigError(
            f"{_FLAG}: the head takes the states behind {', '.join(map(str, kept))} layers, and "
            f"the model has {count}: choose a head that was trained for it"
        )
    return tuple(kept)


def _inner(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Some files have the fields of the layers in an object `model`."""
    inner = values.get("model")
    return {**inner, **values} if isinstance(inner, dict) else values


def _layers_of(fields: ConfigFields, stored: set[str], values: Mapping[str, Any]) -> ModelConfig:
    """The head's layers as a model's, whatever class the file names. How far it reaches is the
    model's matter, so it need not say."""
    whole = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, **_inner(values)}
    layers = ModelConfig.from_hf(whole | {"architectures": ["LlamaForCausalLM"]})
    first = "layers.0.self_attn."
    return dataclasses.replace(
        layers,
        qkv_bias=f"{first}q_proj.bias" in stored,
        output_bias=f"{first}o_proj.bias" in stored,
    )


def _check_same(name: str, own: int, models: int) -> None:
    if own != models:
        raise ConfigError(
            f"{_FLAG}: the head is of another model: its {name} is {own} and the model's {models}"
        )


def _draft_tokens(checkpoint: Checkpoint, head: DraftHeadConfig) -> NDArray[np.int32]:
    """The tokens that the head has logits for. Raises ModelError."""
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise ModelError("a head with draft_vocab_size must be stored as safetensors")
    names = [name for name in checkpoint.names() if _plain(name) == "d2t"]
    if not names:
        raise ModelError("the head has a draft_vocab_size, but no tensor d2t")
    offsets = checkpoint.array(names[0], ("I64", "I32"), 1)
    return draft_token_ids(offsets, head)


def draft_token_ids(offsets: NDArray[Any], head: DraftHeadConfig) -> NDArray[np.int32]:
    """From how far each of the head's tokens is from the model's. Raises ModelError."""
    ids = offsets + np.arange(len(offsets))
    is_valid = (
        len(ids) == head.num_tokens
        and len(np.unique(ids)) == len(ids)
        and ids.min() >= 0
        and ids.max() < head.model.vocab_size
    )
    if not is_valid:
        raise ModelError(
            f"d2t of the head must lead to {head.num_tokens} different tokens below "
            f"{head.model.vocab_size}"
        )
    return ids.astype(np.int32)


def _prediction_layer(
    config: EngineConfig, model: ModelConfig, files: ModelFiles, speculation: SpeculationConfig
) -> DraftHeadPart:
    """The layer behind the model's last in its own checkpoint."""
    checkpoint = open_weights(config, model, files)
    head = prediction_config(model)
    if config.load_format == "dummy":  # it has whatever is requested
        return DraftHeadPart(head, checkpoint, None, speculation.quantization)
    prefix = _prediction_prefix(model)
    if not any(name.startswith(prefix) for name in checkpoint.names()):
        raise ConfigError(
            f"{_FLAG}: the checkpoint has no prediction layer ({prefix}…), which the method mtp "
            "drafts with; use the method ngram"
        )
    weights = HeadWeights(checkpoint, prediction_places(checkpoint.names(), model))
    return DraftHeadPart(head, weights, None, speculation.quantization)


def prediction_config(model: ModelConfig) -> DraftHeadConfig:
    """Its layer is as the model's last, of Qwen3-Next as one with attention. Raises ConfigError."""
    last = model.layers[-1]
    if model.family.naming == "qwen3_next":
        with_attention = [layer for layer in model.layers if layer.mixer == "attention"]
        # Which layers have experts goes by their number, and this one's is 0.
        last = with_attention[-1]._replace(has_experts=model.layers[0].has_experts)
    elif model.family.page != "llama":
        raise ConfigError(
            f"{_FLAG}: prediction layers of {model.architecture} are not computed; use the method "
            "ngram"
        )
    return DraftHeadConfig(
        kind="mtp",
        layers=dataclasses.replace(model, layers=(last,)),
        model=model,
        kept=(model.num_layers,),
        num_tokens=model.vocab_size,
    )


class Place(NamedTuple):
    """Where a tensor of a head is stored."""

    name: str
    part: int = 0  # of so many equal ones, side by side
    parts: int = 1


def _plain(name: str) -> str:
    """Without what some files have before it."""
    name = name.removeprefix("model.")
    return re.sub(r"^midlayer\.", "layers.0.", name)


_FIRST_QKV = re.compile(r"^layers\.0\.self_attn\.([qkv])_proj\.weight$")


def eagle_places(names: Iterable[str], *, is_third: bool) -> dict[str, Place]:
    """From our names to the file's."""
    places: dict[str, Place] = {}
    for name in names:
        plain = _plain(name)
        if plain in ("d2t", "t2d") or (not is_third and plain.startswith(_SHARED)):
            continue
        own = f"model.{plain}" if plain.startswith("layers.") else plain
        if plain == "fc.bias" and not is_third:
            places["fc.state.bias"] = Place(name)
        elif plain == "fc.weight" and not is_third:
            places |= _halves("fc", name)
        elif is_third and (match := _FIRST_QKV.match(plain)):
            prefix = f"model.layers.0.self_attn.{match[1]}_proj"
            places[f"{prefix}.embedding.weight"] = Place(name, 0, 2)
            places[f"{prefix}.weight"] = Place(name, 1, 2)
        else:
            places[own] = Place(name)
    return places


_SHARED = ("embed_tokens.", "lm_head.", "layers.0.input_layernorm.")  # or never read


def prediction_places(names: Iterable[str], model: ModelConfig) -> dict[str, Place]:
    """From our names to the file's. Its embedding and output are the model's own."""
    prefix, own = _prediction_prefix(model), "model.layers.0."
    places: dict[str, Place] = {}
    for name in names:
        rest = name.removeprefix(prefix)
        if model.family.naming == "qwen3_next":
            rest = _qwen3_next_name(rest)
        if not name.startswith(prefix) or rest.startswith(("embed_tokens.", "shared_head.head.")):
            continue
        if rest == "eh_proj.weight":
            places |= _halves(f"{own}eh_proj", name)
        else:
            places[own + rest] = Place(name)
    return places


def _prediction_prefix(model: ModelConfig) -> str:
    """Of all names of the prediction layer's tensors."""
    is_apart = model.family.naming == "qwen3_next"
    return "mtp." if is_apart else f"model.layers.{model.num_layers}."


_QWEN3_NEXT_NAMES = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
}


def _qwen3_next_name(rest: str) -> str:
    """As DeepSeek calls it, without what both have before it."""
    return _QWEN3_NEXT_NAMES.get(rest, rest.removeprefix("layers.0."))


def _halves(own: str, name: str) -> dict[str, Place]:
    return {f"{own}.embedding.weight": Place(name, 0, 2), f"{own}.state.weight": Place(name, 1, 2)}


class HeadWeights:
    """A checkpoint under the names of a head's page."""

    def __init__(self, checkpoint: Checkpoint, places: Mapping[str, Place]) -> None:
        self._checkpoint = checkpoint
        self._places = places

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        place = self._places.get(name, Place(name))
        if place.parts == 1:
            return self._checkpoint.read(place.name, shape)
        rows, columns = shape
        whole = self._checkpoint.read(place.name, (rows, place.parts * columns))
        if whole.dtype not in _BYTES or whole.row_map is not None or whole.column_map is not None:
            raise ModelError(
                f"tensor {place.name} of type {whole.dtype} cannot be taken apart; store it as "
                "BF16, F16 or F32"
            )
        width = columns * _BYTES[whole.dtype]
        cut = whole.data.reshape(rows, -1)[:, place.part * width : (place.part + 1) * width]
        data = np.ascontiguousarray(cut).reshape(-1)
        return dataclasses.replace(whole, name=name, shape=tuple(shape), data=data)

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes
