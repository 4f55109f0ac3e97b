"""Whisper with random weights, as transformers makes it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from octavo_engine.models.speech_names import SpeechNames
from octavo_engine.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

NUM_MELS, NUM_ROWS, VOCABULARY = 16, 50, 120


class HeldTensors:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._tensors[name].contiguous()
        assert tuple(tensor.shape) == shape, name
        return StoredTensor(name, "F32", shape, tensor.numpy().view(np.uint8).reshape(-1))

    @property
    def total_bytes(self) -> int:
        return sum(4 * tensor.numel() for tensor in self._tensors.values())


class TinySpeech(NamedTuple):
    """The library's model, its config.json and its weights."""

    model: Any
    config: dict[str, Any]
    tensors: SpeechNames

    def logits(self, frames: NDArray[np.float32], token_ids: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            out = self.model(
                input_features=torch.from_numpy(frames.T.copy())[None],
                decoder_input_ids=torch.tensor([token_ids]),
            )
        logits: NDArray[np.float32] = out.logits[0].float().numpy()
        return logits


@cache
def tiny_speech() -> TinySpeech:
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=NUM_MELS, d_model=64, max_source_positions=NUM_ROWS,
        max_target_positions=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=96,
        decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=128, pad_token_id=1,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, init_std=0.2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    tensors = {
        name: t.detach() for name, t in model.state_dict().items() if name != "proj_out.weight"
    }
    fields = {**config.to_dict(), "architectures": ["WhisperForConditionalGeneration"]}
    return TinySpeech(model, fields, SpeechNames(HeldTensors(tensors)))


def random_frames(seed: int) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    return random.normal(0.0, 0.7, (2 * NUM_ROWS, NUM_MELS)).astype(np.float32)
