"""The simulator as a model that embeds: vectors follow from the tokens alone; time is modelled."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.sim.backend import step_seconds
from octavo_engine.backends.sim.clock import RealClock
from octavo_engine.models.config import LayerConfig
from octavo_engine.models.encoder_config import EncoderConfig
from octavo_engine.models.pooling_config import PoolingConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.pooling import PoolingStep
    from octavo_engine.backends.sim.clock import Clock
    from octavo_engine.config import EngineConfig

COLUMNS = 64


def sim_pooling_config(config: EngineConfig) -> PoolingConfig:
    """A model of one layer, which is never computed."""
    length = config.max_model_len or config.scheduler.max_model_len
    body = EncoderConfig(
        architecture="BertModel",
        family="bert",
        vocab_size=config.sim.vocab_size,
        hidden_size=COLUMNS,
        intermediate_size=COLUMNS,
        num_heads=1,
        head_dim=COLUMNS,
        layers=(LayerConfig(None, None),),
        max_position_embeddings=length,
        num_types=2,
        norm_eps=1e-12,
        activation="gelu",
    )
    return PoolingConfig(
        body=body,
        pooling="mean",
        normalize=True,
        max_length=length,
        dimensions=tuple(range(1, COLUMNS + 1)),
    )


class SimPoolingBackend:
    """A text's vector is the sum of its tokens' own, so texts that share words are alike."""

    def __init__(
        self, config: EngineConfig, pooling: PoolingConfig, clock: Clock | None = None
    ) -> None:
        self.config = pooling
        self._sim = config.sim
        self._clock = RealClock() if clock is None else clock
        digest = hashlib.blake2b(b"sim", digest_size=8).digest()
        rng = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
        self._table = rng.standard_normal((config.sim.vocab_size, COLUMNS), dtype=np.float32)

    @property
    def name(self) -> str:
        return "sim"

    def prepare(self, *, max_tokens: int, max_texts: int) -> None:
        """There is no memory to plan."""

    def pool(self, step: PoolingStep) -> NDArray[np.float32]:
        rows = self.token_rows(step)
        bounds = zip(step.starts[:-1], step.starts[1:], strict=True)
        return np.stack([rows[start:end].sum(axis=0) for start, end in bounds])

    def token_rows(self, step: PoolingStep) -> NDArray[np.float32]:
        num_tokens = len(step.token_ids)
        seconds = step_seconds(self._sim, num_decodes=0, num_prefill_tokens=num_tokens)
        self._clock.sleep(seconds)
        return self._table[step.token_ids]

    def close(self) -> None:
        """Nothing is held."""
