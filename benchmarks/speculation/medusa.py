"""Medusa heads in torch: what they learn from a model's hidden states, and their files."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from benchmarks.speculation.reporting import say
from benchmarks.speculation.score import NO_TARGET, Score

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from benchmarks.speculation.answers import Answer
    from benchmarks.speculation.states import ModelStates

DECAY = 0.8  # of a head's weight in the loss, to the head before it


class Examples(NamedTuple):
    """Hidden states, and the tokens that came 2, 3, … places behind them."""

    hidden: NDArray[np.float16]  # [N, hidden]
    targets: NDArray[np.int64]  # [N, heads]; NO_TARGET: the answer had ended


def examples_of(states: ModelStates, answers: Sequence[Answer], num_heads: int) -> Examples:
    """State i samples token i of the answer; head k is to guess token i + 1 + k."""
    hidden, targets = [], []
    for answer in answers:
        written = np.array(answer.token_ids[answer.num_prompt_tokens :], np.int64)
        if len(written) < 2:
            continue
        hidden.append(states.hidden(answer).astype(np.float16))
        padded = np.concatenate([written, np.full(num_heads + 1, NO_TARGET)])
        targets.append(
            np.stack([padded[1 + head :][: len(written)] for head in range(num_heads)], axis=1)
        )
    return Examples(np.concatenate(hidden), np.concatenate(targets))


def make_heads(num_heads: int, output: NDArray[np.float32]) -> nn.ModuleList:
    """Each begins as the model's own head: a residual layer that adds nothing, then the matrix."""
    size = output.shape[1]
    heads = nn.ModuleList()
    for _ in range(num_heads):
        layer, last = nn.Linear(size, size, bias=False), nn.Linear(size, len(output), bias=False)
        nn.init.zeros_(layer.weight)
        with torch.no_grad():
            last.weight.copy_(torch.from_numpy(output))
        heads.append(nn.ModuleDict({"layer": layer, "last": last}))
    return heads


def head_logits(head: nn.Module, hidden: Tensor) -> Tensor:
    layer, last = head.get_submodule("layer"), head.get_submodule("last")
    logits: Tensor = last(hidden + functional.silu(layer(hidden)))
    return logits


def fit(
    heads: nn.ModuleList, examples: Examples, *, epochs: int, batch: int, rate: float, seed: int
) -> None:
    """Targets are columns of the heads' logits."""
    torch.set_float32_matmul_precision("medium")  # bf16 products where the processor has them
    hidden, targets = torch.from_numpy(examples.hidden), torch.from_numpy(examples.targets)
    num_steps = epochs * -(-len(hidden) // batch)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=num_steps + 1)
    generator = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    for epoch in range(epochs):
        total = 0.0
        for chosen in _batches(torch.randperm(len(hidden), generator=generator), batch):
            x, wanted = hidden[chosen].float(), targets[chosen]
            loss = torch.zeros(())
            for number, head in enumerate(heads):
                if (wanted[:, number] != NO_TARGET).any():
                    loss = loss + DECAY**number * functional.cross_entropy(
                        head_logits(head, x), wanted[:, number], ignore_index=NO_TARGET
                    )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
        say(f"epoch {epoch + 1}: loss {total / len(hidden):.3f}, "
            f"{time.perf_counter() - started:.0f} s")  # fmt: skip


def _batches(rows: Tensor, size: int) -> Iterator[Tensor]:
    return (rows[first : first + size] for first in range(0, len(rows), size))


def score(heads: nn.ModuleList, examples: Examples) -> Score:
    """A token that no head knows, and the end of an answer, count as wrong."""
    right = []
    with torch.inference_mode():
        for number, head in enumerate(heads):
            guesses = [
                head_logits(head, part.float()).argmax(-1)
                for part in _batches(torch.from_numpy(examples.hidden), 1024)
            ]
            right.append(torch.cat(guesses).numpy() == examples.targets[:, number])
    return Score.of(np.stack(right))


def write_heads(
    folder: Path, heads: nn.ModuleList, token_ids: NDArray[np.int64], vocab_size: int
) -> None:
    """In vLLM's form."""
    weights, size = {}, 0
    for number, head in enumerate(heads):
        layer, last = (head.get_parameter(f"{name}.weight") for name in ("layer", "last"))
        weights[f"blocks.{number}.layers.0.weight"] = layer.detach().bfloat16()
        weights[f"lm_heads.{number}.weight"] = last.detach().bfloat16()
        size = layer.shape[0]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": size,
        "vocab_size": vocab_size,
        "num_heads": len(heads),
        "num_hidden_layers": 1,
    }
    if len(token_ids) < vocab_size:
        config["truncated_vocab_size"] = len(token_ids)
        weights["token_map"] = torch.from_numpy(token_ids)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors")
