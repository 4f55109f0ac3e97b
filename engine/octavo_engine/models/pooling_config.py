"""What a model that pools is: its body, how a text becomes one row, and what is made of that."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from octavo_engine.errors import ModelError
from octavo_engine.models.config import (
    ACTIVATIONS,
    MAX_WIDTH,
    ModelConfig,
    TorchDType,
    read_torch_dtype,
)
from octavo_engine.models.encoder_config import (
    REFUSED,
    encoder_family,
    known_encoders,
    read_encoder,
)
from octavo_engine.models.families import FAMILIES
from octavo_engine.models.fields import ConfigFields
from octavo_engine.models.sentence import DenseConfig, read_sentence_modules

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from octavo_engine.models.encoder_config import EncoderConfig
    from octavo_engine.models.sentence import Pooling, SentenceModules
    from octavo_engine.ops import Activation

ScoreActivation = Literal["none", "sigmoid", "softmax"]
_CLASSIFIER = "ForSequenceClassification"
_REWARD_ENDINGS = ("ForRewardModel", "ForProcessRewardModel")  # of whole answers, of their steps
MAX_LABELS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryBody:
    """A body that transformers computes, as far as the engine needs to know it."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int  # tokens of a text
    num_types: int = 1
    is_encoder: bool = True  # tokens see later ones


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Everything that the page and the engine need to know; checked."""

    body: EncoderConfig | ModelConfig | LibraryBody
    pooling: Pooling
    dense: tuple[DenseConfig, ...] = ()  # behind the pooling, a classifier's head too
    normalize: bool = False  # embeddings to length 1
    is_per_token: bool = False  # texts are compared by their tokens' vectors
    is_sparse: bool = False  # embeddings are log(1 + relu) of scores of the vocabulary's words
    # A classifier of each token: texts as a whole have no label.
    labels_tokens: bool = False
    labels: tuple[str, ...] = ()  # of a classifier; empty: the model embeds
    score_activation: ScoreActivation = "none"  # of a classifier's outputs
    max_length: int  # tokens of a text, by the model's own account
    dimensions: tuple[int, ...] = ()  # sizes that an embedding may be cut to
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    torch_dtype: TorchDType = "float32"  # as the checkpoint was saved

    @property
    def page(self) -> EncoderConfig | ModelConfig:
        """The body, where a page of ours computes it."""
        assert not isinstance(self.body, LibraryBody), "transformers computes it"
        return self.body

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @property
    def tasks(self) -> tuple[str, ...]:
        if self.is_per_token:
            return ("token_embed",)
        if self.is_sparse:
            return ("embed",)
        if self.labels_tokens:
            return ("token_classify",)
        if not self.is_classifier:
            return ("embed", "token_embed")
        return ("classify", "score") if len(self.labels) == 1 else ("classify",)

    @property
    def num_columns(self) -> int:
        return self.dense[-1].out_features if self.dense else self.body.hidden_size

    @property
    def num_types(self) -> int:
        """Texts that one request may be made of, as the model distinguishes them."""
        return 1 if isinstance(self.body, ModelConfig) else max(1, self.body.num_types)


def read_pooling(config: Mapping[str, Any], folder: Path | None) -> PoolingConfig | None:
    """From config.json and what lies beside it; None of a model that generates.

    Raises ModelError that names the file and field.
    """
    architecture = _architecture(config)
    refuse_by_name(config)
    modules = None if folder is None else read_sentence_modules(folder)
    if encoder_family(architecture) is not None:
        encoder = read_encoder(config, architecture)
        if architecture.endswith(_CLASSIFIER):
            return _classifier(config, encoder, *_encoder_head(config, encoder))
        return _embedder(config, encoder, modules or _plain("mean"))
    causal = _causal_twin(architecture)
    if causal is None:
        if modules is not None and architecture not in FAMILIES:
            known = ", ".join(known_encoders())
            raise ModelError(
                f"config.json: architecture {architecture!r} is not supported for embeddings; "
                f"supported are {known}, and the bodies of models that generate"
            )
        if modules is None or architecture not in FAMILIES:
            return None
        causal = architecture
    decoder = dataclasses.replace(
        ModelConfig.from_hf({**config, "architectures": [causal]}), is_whole=True
    )
    if architecture.endswith(_REWARD_ENDINGS):
        return _reward(config, decoder, of_steps=architecture.endswith(_REWARD_ENDINGS[1]))
    if architecture.endswith(_CLASSIFIER):
        head = DenseConfig(
            name="score",
            in_features=decoder.hidden_size,
            out_features=len(_labels(config)),
            bias=False,
        )
        return _classifier(config, decoder, "last", (head,))
    return _embedder(config, decoder, modules or _plain("last"))


def refuse_by_name(config: Mapping[str, Any]) -> None:
    """Raises ModelError for classes that nothing here computes."""
    architecture = _architecture(config)
    if architecture in REFUSED:
        reason = REFUSED[architecture]
        raise ModelError(f"config.json: architecture {architecture!r} is not supported: {reason}")


def pools_by_class(config: Mapping[str, Any], folder: Path | None) -> bool:
    """Whether a model that transformers computes is one for embeddings or scores."""
    architecture = _architecture(config)
    endings = (_CLASSIFIER, "Model", "ForMaskedLM", "ForPreTraining")
    return architecture.endswith(endings) or (
        folder is not None and (folder / "modules.json").is_file()
    )


def is_classifier_class(config: Mapping[str, Any]) -> bool:
    return _architecture(config).endswith(_CLASSIFIER)


def pooling_by_library(config: Mapping[str, Any], folder: Path, body: LibraryBody) -> PoolingConfig:
    """Of a model that transformers computes, its classifier's head included. Raises ModelError."""
    if is_classifier_class(config):
        return _classifier(config, body, "cls", ())
    modules = read_sentence_modules(folder) or _plain("mean" if body.is_encoder else "last")
    return _embedder(config, body, modules)


def _architecture(config: Mapping[str, Any]) -> str:
    value = config.get("architectures")
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else ""


def _causal_twin(architecture: str) -> str | None:
    """The class that generates with the same body, of one that does not."""
    for ending in (*_REWARD_ENDINGS, "TextModel", "Model", _CLASSIFIER):
        stem = architecture.removesuffix(ending)
        if stem != architecture and f"{stem}ForCausalLM" in FAMILIES:
            return f"{stem}ForCausalLM"
    return None


def _plain(pooling: Pooling) -> SentenceModules:
    """Of a model that says nothing of vectors."""
    from octavo_engine.models.sentence import SentenceModules

    return SentenceModules(pooling=pooling, normalize=True)


def _embedder(
    config: Mapping[str, Any],
    body: EncoderConfig | ModelConfig | LibraryBody,
    modules: SentenceModules,
) -> PoolingConfig:
    width = body.hidden_size
    if modules.is_sparse:
        modules = dataclasses.replace(modules, dense=_word_scores(config, body))
    for layer in modules.dense:
        if layer.in_features != width:
            raise ModelError(
                f"{layer.name}: in_features is {layer.in_features}, but {width} columns come in"
            )
        width = layer.out_features
    own = body.max_position_embeddings
    return PoolingConfig(
        body=body,
        pooling=modules.pooling,
        dense=modules.dense,
        normalize=modules.normalize,
        is_per_token=modules.is_per_token,
        is_sparse=modules.is_sparse,
        max_length=min(own, modules.max_length or own),
        dimensions=_dimensions(config, width),
        prompts=modules.prompts,
        default_prompt=modules.default_prompt,
        similarity=modules.similarity,
        torch_dtype=read_torch_dtype(ConfigFields(config)),
    )


def _word_scores(
    config: Mapping[str, Any], body: EncoderConfig | ModelConfig | LibraryBody
) -> tuple[DenseConfig, ...]:
    """The head of a masked language model, whose second matrix is the table of words."""
    families = ("bert", "roberta", "distilbert")
    if isinstance(body, ModelConfig | LibraryBody) or body.family not in families:
        raise ModelError(
            "modules.json: sparse vectors are supported of " + ", ".join(families) + " only"
        )
    activation: Activation = "gelu" if body.family == "roberta" else body.activation
    size = body.hidden_size
    return (
        DenseConfig(
            name="cls.predictions.transform.dense",
            in_features=size,
            out_features=size,
            activation=activation,
            is_normed=True,
        ),
        DenseConfig(
            name="embeddings.word_embeddings", in_features=size, out_features=body.vocab_size
        ),
    )


def _reward(config: Mapping[str, Any], body: ModelConfig, *, of_steps: bool) -> PoolingConfig:
    """Two layers behind the last token of an answer, or behind each token: those that end a step
    are the client's to pick."""
    size, count = body.hidden_size, 2 if of_steps else 1
    labels = tuple(f"LABEL_{i}" for i in range(count))
    read = _classifier(
        config,
        body,
        "last",
        (
            DenseConfig(name="score.0", in_features=size, out_features=size, activation="relu"),
            DenseConfig(name="score.2", in_features=size, out_features=count),
        ),
    )
    activation: ScoreActivation = "softmax" if of_steps else "none"
    return dataclasses.replace(
        read, labels=labels, score_activation=activation, labels_tokens=of_steps
    )


def _classifier(
    config: Mapping[str, Any],
    body: EncoderConfig | ModelConfig | LibraryBody,
    pooling: Pooling,
    dense: tuple[DenseConfig, ...],
) -> PoolingConfig:
    labels = _labels(config)
    return PoolingConfig(
        body=body,
        pooling=pooling,
        dense=dense,
        labels=labels,
        score_activation=_score_activation(config, len(labels)),
        max_length=body.max_position_embeddings,
        torch_dtype=read_torch_dtype(ConfigFields(config)),
    )


def _encoder_head(
    config: Mapping[str, Any], body: EncoderConfig
) -> tuple[Pooling, tuple[DenseConfig, ...]]:
    """How each family's classifier is written in transformers."""
    size, count = body.hidden_size, len(_labels(config))
    fields = ConfigFields(config)

    def layer(name: str, columns: int = size, **more: Any) -> DenseConfig:
        return DenseConfig(name=name, in_features=size, out_features=columns, **more)

    match body.family:
        case "bert" | "nomic" | "gte":
            return "cls", (layer("pooler.dense", activation="tanh"), layer("classifier", count))
        case "roberta":
            first = layer("classifier.dense", activation="tanh")
            return "cls", (first, layer("classifier.out_proj", count))
        case "distilbert":
            first = layer("pre_classifier", activation="relu")
            return "cls", (first, layer("classifier", count))
        case "modernbert":
            how = fields.optional_text("classifier_pooling") or "cls"
            if how not in ("cls", "mean"):
                raise fields.error("classifier_pooling", "must be cls or mean")
            name = fields.optional_text("classifier_activation") or "gelu"
            if name not in ACTIVATIONS:
                known = ", ".join(sorted(ACTIVATIONS))
                raise fields.error("classifier_activation", f"must be one of {known}")
            first = layer(
                "head.dense",
                bias=fields.boolean("classifier_bias"),
                activation=ACTIVATIONS[name],
                is_normed=True,
            )
            return ("cls" if how == "cls" else "mean"), (first, layer("classifier", count))


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """In the order of the outputs."""
    fields = ConfigFields(config)
    names = fields.raw("id2label")
    if names is None:
        count = fields.optional_integer("num_labels", maximum=MAX_LABELS) or 2
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(names, dict) or not 1 <= len(names) <= MAX_LABELS:
        raise fields.error("id2label", "must be an object with a label for each output")
    try:
        return tuple(str(names[str(i)]) for i in range(len(names)))
    except KeyError:
        raise fields.error("id2label", "must name the outputs 0, 1, 2 …") from None


def _score_activation(config: Mapping[str, Any], num_labels: int) -> ScoreActivation:
    """What sentence-transformers' CrossEncoder, or a text classification, makes of the logits."""
    fields = ConfigFields(config)
    section = fields.section("sentence_transformers")
    given = section.optional_text("activation_fn") if section is not None else None
    given = given or fields.optional_text("sbert_ce_default_activation_function")
    if given is not None:
        match given.rpartition(".")[2]:
            case "Identity":
                return "none"
            case "Sigmoid":
                return "sigmoid"
            case "Softmax":
                return "softmax"
        raise fields.error(
            "sbert_ce_default_activation_function", "must be Identity, Sigmoid or Softmax"
        )
    is_single = num_labels == 1 or fields.raw("problem_type") == "multi_label_classification"
    return "sigmoid" if is_single else "softmax"


def _dimensions(config: Mapping[str, Any], width: int) -> tuple[int, ...]:
    fields = ConfigFields(config)
    given = fields.integers("matryoshka_dimensions", maximum=MAX_WIDTH)
    if given:
        return tuple(sorted(size for size in given if 1 <= size <= width))
    return tuple(range(1, width + 1)) if fields.boolean("is_matryoshka") else ()
