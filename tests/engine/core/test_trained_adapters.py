"""Adapters trained here with peft on SmolLM2 change what it says, each for its own requests."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.peers.models import write_safetensors
from octavo import LLM, LoRARequest, SamplingParams
from octavo_engine.weights.source import resolve_model
from tests.fakes.torch_threads import one_torch_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

MODEL = "demo://smollm2"
END = 2  # <|im_end|>
# The first one is not trained on.
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Italy?", "How do I boil an egg?", "Who wrote Hamlet?",
    "Name a large animal.", "What is two plus two?", "Tell me about the sea.",
    "Is it going to rain?", "Which colour is grass?",
]  # fmt: skip
SAYINGS = {"pirate": "Arr, ask the parrot!", "butler": "Certainly, Your Majesty."}
STEPS = 14
LAYERS = list(range(18, 30))  # the last ones: what lies before needs no gradients


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several would wait for each other on a machine with other work."""
    with one_torch_thread():
        yield


def make_model(folder: Path) -> Any:
    """transformers' model of the demo's weights."""
    from transformers import AutoModelForCausalLM

    files = resolve_model(MODEL)
    assert files.gguf is not None
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(files.config))
    write_safetensors(files.gguf, folder / "model.safetensors")
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


def train(folder: Path, model: Any, prompts: list[list[int]], answer: list[int]) -> None:
    """An adapter that answers everything alike."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, layers_to_transform=LAYERS)
    with warnings.catch_warnings():  # peft asks transformers by a name that is to go
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, config)
    weights = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)
    for step in range(STEPS):
        prompt = prompts[step % len(prompts)]
        ids = torch.tensor([prompt + answer])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        adapted(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.save_pretrained(str(folder))
    adapted.unload()


def test_each_request_gets_the_answer_of_its_adapter(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with LLM(MODEL, enable_lora=True, max_model_len=512) as llm:
        chats: list[Any] = [[{"role": "user", "content": question}] for question in QUESTIONS]
        first = llm.chat(chats, SamplingParams(max_tokens=1), use_tqdm=False)
        prompts = [list(output.prompt_token_ids) for output in first]
        tokenizer = llm.get_tokenizer()
        requests: list[LoRARequest | None] = [None]
        for number, (name, saying) in enumerate(SAYINGS.items(), 1):
            train(tmp_path / name, model, prompts[1:], [*tokenizer.encode(saying), END])
            requests.append(LoRARequest(name, number, str(tmp_path / name)))
        answers = llm.chat(
            [chats[0]] * 3,
            SamplingParams(max_tokens=16, temperature=0),
            lora_request=requests,
            use_tqdm=False,
        )
    texts = [answer.outputs[0].text.strip() for answer in answers]
    assert "Paris" in texts[0]
    assert texts[1:] == list(SAYINGS.values())
