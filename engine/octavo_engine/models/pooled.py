"""A model that pools: a body, one row for each text, and the layers behind that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo_engine.errors import ModelError
from octavo_engine.models.bert import Bert
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.gemma import GemmaBody
from octavo_engine.models.gpt import GptBody
from octavo_engine.models.llama import LlamaBody
from octavo_engine.models.modernbert import ModernBert

if TYPE_CHECKING:
    from octavo_engine.models.encoder_config import EncoderConfig
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.models.sentence import DenseConfig
    from octavo_engine.ops import EncoderOps, Loader, Value


class Body(Protocol):
    def forward(self, ops: EncoderOps) -> Value:
        """The last hidden states of all tokens: [T, hidden]."""


class Decoder:
    """The body of a model that generates."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        pages: dict[str, type[LlamaBody | GemmaBody | GptBody]] = {
            "llama": LlamaBody,
            "gemma": GemmaBody,
            "gpt": GptBody,
        }
        page = config.family.page
        if not isinstance(page, str):
            raise ModelError(
                f"config.json: architecture {config.architecture!r} comes from another package; "
                "such models generate text only"
            )
        self.body = pages[page](config, loader, max_model_len)

    def forward(self, ops: EncoderOps) -> Value:
        return self.body.normed(ops, self.body.forward(ops))


class Dense:
    """A linear layer, its activation and its norm."""

    def __init__(self, config: DenseConfig, loader: Loader, norm_eps: float, *, norm_bias: bool):
        self.linear = loader.linear(
            config.name, config.in_features, config.out_features, bias=config.bias
        )
        self.activation = config.activation
        self.norm = self.norm_bias = None
        if config.is_normed:
            name = config.name.removesuffix("dense") + "norm"
            self.norm = loader.vector(f"{name}.weight", config.out_features)
            if norm_bias:
                self.norm_bias = loader.vector(f"{name}.bias", config.out_features)
        self.norm_eps = norm_eps

    def forward(self, ops: EncoderOps, x: Value) -> Value:
        x = ops.linear(x, self.linear)
        if self.activation is not None:
            x = ops.activation(x, self.activation)
        if self.norm is not None:
            x = ops.layer_norm(x, self.norm, self.norm_bias, self.norm_eps)
        return x


class PooledModel:
    """Whole texts to one row each, or to one for each token."""

    def __init__(
        self,
        config: PoolingConfig,
        loader: Loader,
        max_model_len: int,
        body: Body | None = None,
    ) -> None:
        """`body`: one that is no page of ours."""
        self.pooling = config.pooling
        self.pools_last = config.is_sparse
        if body is not None:  # layers behind it have no norms
            self.body = body
            self.dense = [Dense(layer, loader, 0.0, norm_bias=False) for layer in config.dense]
            return
        page = config.page
        self.body = _body(page, loader, max_model_len)
        bias = isinstance(page, ModelConfig) or page.norm_bias
        self.dense = [Dense(layer, loader, page.norm_eps, norm_bias=bias) for layer in config.dense]

    def forward(self, ops: EncoderOps) -> Value:
        """[S, columns]"""
        x = self.body.forward(ops)
        if self.pools_last:
            return ops.pool(self._through_dense(ops, x), "max")
        if self.pooling == "cls" or self.pooling == "last":
            x = ops.select_rows(x)  # of each text the first or the last token: the step says which
        else:
            x = ops.pool(x, self.pooling)
        return self._through_dense(ops, x)

    def forward_tokens(self, ops: EncoderOps) -> Value:
        """[T, columns]"""
        return self._through_dense(ops, self.body.forward(ops))

    def _through_dense(self, ops: EncoderOps, x: Value) -> Value:
        for layer in self.dense:
            x = layer.forward(ops, x)
        return x


def _body(config: EncoderConfig | ModelConfig, loader: Loader, max_model_len: int) -> Body:
    if isinstance(config, ModelConfig):
        return Decoder(config, loader, max_model_len)
    make = ModernBert if config.family == "modernbert" else Bert
    return make(config, loader, max_model_len)
