"""Tiny random models that embed or classify, saved as folders the way their makers save them."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

VOCABULARY = 300
MAX_POSITIONS = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "attn_implementation": "eager",
}
DECODER = SHAPE | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
DISTIL = {
    "vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4,
    "max_position_embeddings": MAX_POSITIONS, "attn_implementation": "eager",
}  # fmt: skip
ROBERTA = SHAPE | {"pad_token_id": 1, "type_vocab_size": 1}
MODERN = SHAPE | {
    "num_hidden_layers": 4, "local_attention": 24, "global_attn_every_n_layers": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip

# Name → class, its config, and what sentence-transformers' files say of pooling (None: no files).
EMBEDDERS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "bert": ("BertModel", SHAPE, "mean"),
    "bert-cls": ("BertModel", SHAPE | {"hidden_act": "gelu_new"}, "cls"),
    "bert-max": ("BertModel", SHAPE, "max"),
    "bert-sqrt": ("BertModel", SHAPE, "mean_sqrt_len"),
    "bert-weighted": ("BertModel", SHAPE, "weightedmean"),
    "bert-alone": ("BertModel", SHAPE, None),
    "roberta": ("RobertaModel", ROBERTA, "mean"),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA | {"layer_norm_eps": 1e-5}, "cls"),
    "distilbert": ("DistilBertModel", DISTIL, "mean"),
    "nomic": ("NomicBertModel", SHAPE | {"pad_token_id": 0}, "mean"),
    "gte": ("GteModel", SHAPE | {"pad_token_id": 0, "type_vocab_size": 1}, "cls"),
    "gte-no-types": ("GteModel", SHAPE | {"pad_token_id": 0, "type_vocab_size": 0}, "mean"),
    "modernbert": ("ModernBertModel", MODERN, "cls"),
    "modernbert-biased": ("ModernBertModel", MODERN | {"norm_bias": True, "attention_bias": True,
                                                       "mlp_bias": True}, "mean"),
    "llama": ("LlamaModel", DECODER, "mean"),
    "qwen2": ("Qwen2Model", DECODER, "last"),
    "qwen3": ("Qwen3Model", DECODER, "last"),
    "qwen3-alone": ("Qwen3Model", DECODER, None),
    "mistral-window": ("MistralModel", DECODER | {"sliding_window": 24}, "last"),
}  # fmt: skip
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", SHAPE | {"num_labels": 3}),
    "bert-score": ("BertForSequenceClassification", SHAPE | {"num_labels": 1}),
    "roberta": ("RobertaForSequenceClassification", ROBERTA | {"num_labels": 2}),
    "xlm-roberta-score": ("XLMRobertaForSequenceClassification", ROBERTA | {"num_labels": 1}),
    "distilbert": ("DistilBertForSequenceClassification", DISTIL | {"num_labels": 2}),
    "gte": ("GteForSequenceClassification", SHAPE | {"pad_token_id": 0, "num_labels": 3}),
    "modernbert": ("ModernBertForSequenceClassification", MODERN | {"num_labels": 3}),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        MODERN | {"num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "qwen3": ("Qwen3ForSequenceClassification", DECODER | {"num_labels": 4}),
}
_MODES = {
    "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens",
    "mean_sqrt_len": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens",
    "last": "lasttoken",
}  # fmt: skip


@dataclass(frozen=True)
class TinyPooler:
    """transformers' model, and the folder it was saved to."""

    model: Any
    folder: Path
    pooling: str

    def hidden(self, ids: Sequence[int], types: Sequence[int] = ()) -> torch.Tensor:
        """The last hidden states of one text, [tokens, hidden]."""
        with torch.inference_mode():
            outputs: torch.Tensor = self.model(**_inputs(ids, types)).last_hidden_state[0]
        return outputs

    def embedding(self, ids: Sequence[int], types: Sequence[int] = ()) -> NDArray[np.float32]:
        """What sentence-transformers' Pooling makes of it, before it is normalised."""
        array: NDArray[np.float32] = pooled(self.hidden(ids, types), self.pooling).numpy()
        return array

    def logits(self, ids: Sequence[int], types: Sequence[int] = ()) -> NDArray[np.float32]:
        with torch.inference_mode():
            array: NDArray[np.float32] = self.model(**_inputs(ids, types)).logits[0].numpy()
        return array


def pooled(x: torch.Tensor, how: str) -> torch.Tensor:
    match how:
        case "cls":
            return x[0]
        case "last":
            return x[-1]
        case "max":
            return x.max(0).values
        case "mean_sqrt_len":
            return x.sum(0) / math.sqrt(len(x))
        case "weightedmean":
            weights = torch.arange(1.0, len(x) + 1)
            return (x * weights[:, None]).sum(0) / weights.sum()
    return x.mean(0)


@functools.cache
def tiny_embedder(name: str) -> TinyPooler:
    kind, fields, pooling = EMBEDDERS[name]
    default = "last" if fields is DECODER else "mean"
    tiny = saved(kind, fields, pooling or default)
    if pooling is not None:
        write_modules(tiny.folder, pooling)
    return tiny


@functools.cache
def tiny_classifier(name: str) -> TinyPooler:
    kind, fields = CLASSIFIERS[name]
    return saved(kind, fields)


def write_modules(folder: Path, pooling: str, *, normalize: bool = True, **files: Any) -> None:
    """sentence-transformers' files, and others by their names without .json."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
         "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{mode}": name == pooling for name, mode in _MODES.items()}
    config = {"word_embedding_dimension": 64, **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _inputs(ids: Sequence[int], types: Sequence[int]) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.tensor([list(ids)])}
    if types:
        inputs["token_type_ids"] = torch.tensor([list(types)])
    return inputs


def saved(kind: str, fields: dict[str, Any], pooling: str = "") -> TinyPooler:
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**fields)).eval()
    with torch.no_grad():  # larger than a fresh model's, so that every part has its say
        for name, values in model.named_parameters():
            if values.dim() > 1:
                values.normal_(0, 0.12)
            elif name.endswith("bias"):
                values.normal_(0, 0.1)
            else:
                values.normal_(1, 0.1)
    folder = Path(tempfile.mkdtemp(prefix="tiny-"))
    model.save_pretrained(folder)
    return TinyPooler(model, folder, pooling)
