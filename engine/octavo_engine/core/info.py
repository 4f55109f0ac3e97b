"""What a running engine says of itself: the model it serves and how it fares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from octavo_engine.state.kv_source import KVSource  # noqa: TC001  (msgspec reads it)

if TYPE_CHECKING:
    from octavo_engine.protocol.loading import LoadProgress

HealthState = Literal["loading", "ready", "stalled", "draining", "dead"]


class SpeechInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model that reads audio: its windows, and which tokens its makers suppress."""

    num_mels: int
    num_frames: int  # of a window, in hundredths of a second
    suppressed: tuple[int, ...] = ()
    suppressed_at_begin: tuple[int, ...] = ()
    num_aligned_heads: int = 0  # whose attention says when words were said; 0: words have no times


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Settled once the model is loaded. Crosses the process boundary as msgpack."""

    names: tuple[str, ...]
    max_model_len: int  # tokens in one sequence, prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int  # of the KV pool, 16 tokens of a group of layers each
    kv_bytes: int  # that pool's memory; 0 for the simulator
    num_cache_groups: int = 1  # of layers that share block tables
    backend: str  # such as "native/avx2"
    default_params: dict[str, int | float]  # of generation_config.json, under SamplingParams' names
    load_seconds: float
    architecture: str = ""  # the model class that config.json names; empty: the simulator
    implementation: str = "octavo"  # or transformers, whose bits may depend on the batch
    format: str = ""  # of its weights, such as "safetensors bfloat16"; identity.format_of
    tasks: tuple[str, ...] = ("generate",)  # or some of state.pooling.PoolingTask
    embedding_size: int = 0  # of a model that embeds
    dimensions: tuple[int, ...] = ()  # sizes it may be cut to; empty: not made for that
    sees: bool = False  # pictures in prompts are computed
    labels: tuple[str, ...] = ()  # of a classifier, in the order of its outputs
    prompts: dict[str, str] = {}  # what an embedder wants before a text, by the text's purpose
    default_prompt: str | None = None  # one of them, for texts that name none
    similarity: str = "cosine"  # that its makers compare embeddings by
    speech: SpeechInfo | None = None
    kv_source: KVSource | None = None  # where its KV blocks are served to other engines
    kv_store: str = ""  # id of the store of KV blocks that it shares; empty: none
    cache_key: bytes  # digest of all that makes one KV block differ from another model's


@dataclass(frozen=True, slots=True)
class CoreHealth:
    """One answer to "how is the engine?". `ready` and `draining` are well; `loading` is not yet.

    A `stalled` engine makes no progress and is killed soon; a `dead` one is gone, and `reason` says
    whether it is being restarted.
    """

    state: HealthState
    reason: str = ""  # one sentence; empty when all is well
    progress: float = 1.0  # of loading, 0 to 1
    loading: LoadProgress | None = None  # the same in bytes, once there are some
    restarts: bool = True  # of a dead one: it is started again, as long as nothing else is said

    @property
    def is_live(self) -> bool:
        return self.state in ("loading", "ready", "draining")

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"
