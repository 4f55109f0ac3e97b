"""What answers in a comparison: the same model, in engines of any settings."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from octavo_engine.backends.draft_part import DraftHeadPart, DraftPart
from octavo_engine.backends.head_files import HeadsPart
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.offline.llm import LLM
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.draft_head import DraftHeadConfig
from octavo_engine.models.medusa import MedusaConfig
from octavo_engine.models.mlp_speculator import MlpSpeculatorConfig
from octavo_engine.weights.dummy import SCALE, DummyCheckpoint
from tests.fakes.talkative import VOCAB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import Backend
    from octavo_engine.config import SpeculationConfig
    from octavo_engine.models.draft_head import DraftHeadKind

MAX_MODEL_LEN = 512
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
# What each says beyond it: biases, windows, layers of two kinds, experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Mistral": {"sliding_window": 24},
    "Qwen3": {"head_dim": 32},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma3": {
        "num_hidden_layers": 3, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 24,
        "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "head_dim": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip


class LoudCheckpoint(DummyCheckpoint):
    """Weights large enough that all of a model matters."""

    def _values(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = super()._values(name, shape)
        return values * np.float32(1.2 / SCALE / shape[-1] ** 0.5) if len(shape) > 1 else values


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine may be told without its answers changing."""

    num_blocks: int = 512
    num_threads: int = 1
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(
            max_num_batched_tokens=512, enable_prefix_caching=False, queue_timeout_s=math.inf
        )
    )
    speculative_config: str | None = None


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Random weights; speaks bytes, so that half its characters are broken."""

    family: str
    formats: tuple[tuple[str, Any], ...] = ()  # arguments of NativeBackend

    methods: ClassVar[tuple[str, ...]] = (
        "ngram", "suffix", "draft_model", "medusa", "mlp_speculator", "eagle", "eagle3", "mtp",
    )  # fmt: skip

    def engine(self, settings: Settings) -> LLM:
        config = EngineConfig(
            device="sim",
            max_model_len=MAX_MODEL_LEN,
            scheduler=settings.scheduler,
            speculative_config=settings.speculative_config,
        )
        backend = self._backend(settings.num_threads, config)
        blocks = settings.num_blocks * len(backend.cache_layout.groups)
        config = config.replace(sim=SimConfig(kv_blocks=blocks, vocab_size=VOCAB))
        return LLM.from_config(config, backend=backend)

    def _backend(self, num_threads: int, settings: EngineConfig) -> Backend:
        names = {"architectures": [f"{self.family}ForCausalLM"]}
        config = ModelConfig.from_hf({**_SHAPE, **FAMILIES[self.family], **names})
        draft = heads = None
        if settings.draft is not None:  # the model itself, or one that knows nothing
            draft = DraftPart(config, LoudCheckpoint(0 if settings.draft.model == "same" else 1))
        if settings.heads is not None:
            heads = any_heads(settings.heads, config)
        return NativeBackend(
            config,
            LoudCheckpoint(),
            draft_head=any_head(settings, config),
            max_model_len=MAX_MODEL_LEN,
            num_threads=num_threads,
            draft=draft,
            heads=heads,
            **dict(self.formats),
        )


def any_heads(speculation: SpeculationConfig, model: ModelConfig) -> HeadsPart:
    """With weights that know nothing."""
    count, size = speculation.num_speculative_tokens, model.hidden_size
    if speculation.method == "mlp_speculator":
        sizes = {"emb_dim": size, "inner_dim": 48, "vocab_size": VOCAB, "n_predict": count}
        return HeadsPart(MlpSpeculatorConfig.from_hf(sizes), LoudCheckpoint(), count)
    sizes = {"hidden_size": size, "vocab_size": VOCAB, "num_heads": count}
    return HeadsPart(MedusaConfig.from_hf(sizes), LoudCheckpoint(), count)


def any_head(settings: EngineConfig, model: ModelConfig) -> DraftHeadPart | None:
    """With weights that know nothing; that of eagle3 drafts every third token only."""
    speculation = settings.draft_head
    if speculation is None:
        return None
    kind = cast("DraftHeadKind", speculation.method)
    count = model.num_layers
    ids = np.arange(0, VOCAB, 3, dtype=np.int32) if kind == "eagle3" else None
    head = DraftHeadConfig(
        kind=kind,
        layers=dataclasses.replace(model, layers=model.layers[-1:]),
        model=model,
        kept=(1, 2, count) if kind == "eagle3" else (count,),
        num_tokens=VOCAB if ids is None else len(ids),
        has_own_output=kind == "eagle3",
    )
    return DraftHeadPart(head, LoudCheckpoint(2), ids)


@dataclass(frozen=True, slots=True)
class RealModel:
    """SmolLM2, whose answers are texts."""

    config: EngineConfig

    methods: ClassVar[tuple[str, ...]] = ("ngram", "suffix")

    def engine(self, settings: Settings) -> LLM:
        kind = self.config.kv_cache_dtype
        per_number = {"int8": 1, "fp8": 1, "float32": 4}.get(kind, 2)
        per_block = 30 * 2 * 16 * 3 * (64 * per_number + (2 if per_number == 1 else 0))
        return LLM.from_config(
            self.config.replace(
                max_model_len=MAX_MODEL_LEN,
                kv_cache_memory_bytes=settings.num_blocks * per_block,
                num_threads=settings.num_threads,
                scheduler=settings.scheduler,
                speculative_config=settings.speculative_config,
            )
        )


Model = TinyModel | RealModel


def any_tiny_model(rng: Random) -> TinyModel:
    formats: dict[str, Any] = {
        "dtype": rng.choice(["f32", "bf16", "bf16"]),
        "quantization": rng.choice(["auto", "auto", "int8", "int4"]),
        "kv_cache_dtype": rng.choice(["auto", "auto", "int8", "fp8", "fp8_e5m2"]),
    }
    if formats["quantization"] != "auto":
        formats["activation_bits"] = rng.choice([8, 16])
    return TinyModel(rng.choice(list(FAMILIES)), tuple(formats.items()))


def any_real_model(rng: Random) -> RealModel:
    return RealModel(
        EngineConfig(
            device="cpu",
            activation_bits=rng.choice([8, 16]),
            kv_cache_dtype=rng.choice(["auto", "int8", "fp8"]),
        )
    )


def any_speculation(rng: Random, methods: Sequence[str]) -> str:
    fields: dict[str, Any] = {
        "method": rng.choice(methods),
        "num_speculative_tokens": rng.choice([1, 3, 6]),
    }
    if fields["method"] == "ngram":
        fields |= {"prompt_lookup_min": rng.choice([1, 2]), "prompt_lookup_max": 4}
    elif fields["method"] == "suffix":
        fields |= {
            "suffix_decoding_max_spec_factor": rng.choice([0.5, 1.0, 3.0]),
            "suffix_decoding_min_token_prob": rng.choice([0.0, 0.4]),
        }
    elif fields["method"] != "mtp":
        fields["model"] = rng.choice(["same", "other"])
    return json.dumps(fields)


def any_settings(rng: Random, methods: Sequence[str] = ("ngram",)) -> Settings:
    """Small enough in one way or another that requests get in each other's way."""
    guessing = any_speculation(rng, methods) if rng.random() < 0.5 else None
    return Settings(
        num_blocks=rng.choice([33, 40, 64, 256]),  # a sequence of full length takes 32
        num_threads=rng.choice([1, 2]),
        scheduler=SchedulerConfig(
            max_num_seqs=rng.choice([1, 2, 7, 32]),
            max_num_batched_tokens=rng.choice([16, 40, 128, 512]),
            enable_prefix_caching=rng.random() < 0.7,
            policy=rng.choice(["fcfs", "priority"]),
            queue_timeout_s=math.inf,  # refusals are no answers
        ),
        speculative_config=guessing,
    )


def reported(settings: Settings) -> str:
    return f"{dataclasses.asdict(settings)}"
