"""An EAGLE-3 head in torch: its passes over whole answers, what it learns, and its files.

A row is a position: the model's states there and the token behind it; its logits are of the token
after that. At the second pass the head's own state stands in for the model's, as when it drafts the
second token, and so on: so it learns from its own states, too (the paper's training-time test).

Positions where nothing is drafted, those of the prompt, only have keys and values. The places that
it drafts from are called anchors.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

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

DECAY = 0.8  # of a pass's weight in the loss, to the pass before it
LIKELIEST = 16  # tokens of the model's own distribution that are learned from
_F16_MAX = 65504.0  # some models have single values beyond it
WRITTEN = 0.5  # weight of the token that was written, beside that distribution


class Example(NamedTuple):
    """One answer."""

    states: Tensor  # [T, states of several layers], float16
    token_ids: Tensor  # [T + 1], those of the prompt, too
    first: int  # anchor: where the first token of the answer is behind
    likeliest: Tensor  # [A, K] columns of the head's logits, of each token of the answer
    shares: Tensor  # [A, K], of the columns; 0 where the head has none


class Eagle3Head(nn.Module):
    """As `octavo_engine.models.draft_head.Eagle3` computes it."""

    def __init__(
        self,
        config: dict[str, Any],
        embedding: NDArray[np.float32],
        scales: Sequence[float],
        num_out: int,
    ) -> None:
        """`scales`: what the states of each layer are multiplied by before they are learned
        from."""
        super().__init__()
        size, width = config["hidden_size"], config["intermediate_size"]
        self.num_heads, self.head_dim = config["num_attention_heads"], config["head_dim"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.eps, self.theta = config["rms_norm_eps"], config["rope_theta"]
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.embedding = torch.from_numpy(embedding).bfloat16()  # the model's own: not trained

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> nn.Parameter:
            return nn.Parameter(torch.ones(size))

        self.scales = torch.tensor(scales).repeat_interleave(size)
        self.fc = linear(len(scales) * size, size)
        self.embedding_norm, self.state_norm, self.mlp_norm, self.norm = (norm() for _ in range(4))
        self.qkv = linear(2 * size, q_size + 2 * kv_size)
        self.attention_out = linear(q_size, size)
        self.gate_up, self.down = linear(size, 2 * width), linear(width, size)
        self.output = linear(size, num_out)

    def passes(self, batch: Sequence[Example], count: int) -> Iterator[Tensor]:
        """Logits of each pass at all anchors; the rows of the k-th that lie beyond an answer's end
        mean nothing."""
        rows = Rows.of(batch)
        state = self.joined(rows.states)
        seen = Seen(rows, self.num_heads // self.num_kv_heads)
        for number in range(count):
            if number == 0:
                state = self.layer(rows.next_ids(0, all_rows=True), state, rows.positions, seen)
                state = state[rows.anchors]
            else:
                positions = rows.positions[rows.anchors] + number
                state = self.layer(rows.next_ids(number), state, positions, seen)
            yield self.logits(state)

    def joined(self, states: Tensor) -> Tensor:
        """The model's states of several layers as one of the head's."""
        result: Tensor = self.fc(states * self.scales)
        return result

    def layer(self, token_ids: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> Tensor:
        embedding = self._normed(self.embedding[token_ids].float(), self.embedding_norm)
        both = torch.cat([embedding, self._normed(state, self.state_norm)], dim=-1)
        qkv = self.qkv(both).float().unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = (self._turned(one, positions) for one in (q, k))
        x = state + self.attention_out(seen.attend(q, k, v).flatten(1))
        gate, up = self.gate_up(self._normed(x, self.mlp_norm)).chunk(2, dim=-1)
        return torch.add(x, self.down(functional.silu(gate) * up))

    def logits(self, state: Tensor) -> Tensor:
        result: Tensor = self.output(self._normed(state, self.norm))
        return result

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), weight, self.eps)

    def _turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half) / half)
        angles = (positions[:, None] * frequencies)[:, None]
        left, right = heads[..., :half], heads[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Rows(NamedTuple):
    """The answers of a batch, one behind another, without padding."""

    states: Tensor
    token_ids: list[Tensor]
    positions: Tensor
    anchors: Tensor  # rows
    lengths: list[int]  # rows of each answer
    firsts: list[int]  # its first anchor

    @classmethod
    def of(cls, batch: Sequence[Example]) -> Rows:
        lengths = [len(one.states) for one in batch]
        positions = torch.cat([torch.arange(length) for length in lengths])
        firsts = torch.tensor([one.first for one in batch])
        is_anchor = positions >= firsts.repeat_interleave(torch.tensor(lengths))
        return cls(
            torch.cat([one.states.float() for one in batch]),
            [one.token_ids for one in batch],
            positions,
            is_anchor.nonzero()[:, 0],
            lengths,
            firsts.tolist(),
        )

    def next_ids(self, number: int, *, all_rows: bool = False) -> Tensor:
        """The token behind each position, that many places on; past the end any token."""
        found = []
        for ids, first in zip(self.token_ids, self.firsts, strict=True):
            start = 1 + number + (0 if all_rows else first)
            count = len(ids) - 1 - (0 if all_rows else first)
            own = ids[start : start + count]
            found.append(functional.pad(own, (0, count - len(own))))
        return torch.cat(found)


class Seen:
    """Keys and values: of the first pass those at and before an anchor, of each later one its
    own."""

    def __init__(self, rows: Rows, share: int) -> None:
        self._rows = rows
        self._share = share  # heads of queries to one of keys
        self._first: list[tuple[Tensor, Tensor]] = []  # of each answer, [heads, T, size]
        self._later: list[tuple[Tensor, Tensor]] = []  # of each pass, [anchors, heads, size]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (one.repeat_interleave(self._share, dim=1) for one in (k, v))
        if not self._first:
            parts = [torch.split(one, self._rows.lengths) for one in (k, v)]
            self._first = [
                (key.transpose(0, 1), value.transpose(0, 1))
                for key, value in zip(*parts, strict=True)
            ]
            queries = torch.split(q, self._rows.lengths)
            whole = [
                functional.scaled_dot_product_attention(
                    query.transpose(0, 1), key, value, is_causal=True
                ).transpose(0, 1)
                for query, (key, value) in zip(queries, self._first, strict=True)
            ]
            return torch.cat(whole)
        self._later.append((k, v))
        return torch.cat([*self._later_parts(q)])

    def _later_parts(self, q: Tensor) -> Iterator[Tensor]:
        counts = [
            length - first
            for length, first in zip(self._rows.lengths, self._rows.firsts, strict=True)
        ]
        start, scale = 0, q.shape[-1] ** -0.5
        for (keys, values), first, count in zip(
            self._first, self._rows.firsts, counts, strict=True
        ):
            own = slice(start, start + count)
            start += count
            queries = q[own].transpose(0, 1) * scale
            hidden = torch.ones(count, keys.shape[1], dtype=torch.bool).triu(first + 1)
            scores = [(queries @ keys.transpose(1, 2)).masked_fill(hidden, -torch.inf)]
            scores += [(q[own] * scale * k[own]).sum(-1).T[..., None] for k, _ in self._later]
            weights = torch.cat(scores, dim=-1).softmax(dim=-1)
            result = weights[..., : keys.shape[1]] @ values
            for index, (_, v) in enumerate(self._later, keys.shape[1]):
                result = result + weights[..., index, None] * v[own].transpose(0, 1)
            yield result.transpose(0, 1)


# -- examples -------------------------------------------------------------------------------------


def example_of(states: ModelStates, answer: Answer, columns: NDArray[np.int64]) -> Example:
    """`columns`: of the head's logits, by token; NO_TARGET where it has none."""
    kept, likeliest = states.layers(answer, LIKELIEST)
    own = columns[likeliest.token_ids]
    return Example(
        torch.from_numpy(np.clip(kept, -_F16_MAX, _F16_MAX).astype(np.float16)),
        torch.tensor(answer.token_ids),
        answer.num_prompt_tokens - 1,
        torch.from_numpy(np.maximum(own, 0)),
        torch.from_numpy(np.where(own == NO_TARGET, np.float32(0), likeliest.shares)),
    )


def head_config(states: ModelStates, num_tokens: int) -> dict[str, Any]:
    """config.json of a head for a model. Raises SystemExit where none is trained for it."""
    model = states.config
    rope = model.layers[-1].rope
    if model.family.page != "llama" or model.latent is not None or rope is None:
        raise SystemExit(
            f"eagle3 heads are not trained for {model.architecture}; train medusa heads"
        )
    count = model.num_layers
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rope.theta,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": num_tokens,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(kept_layers(count)),
    }


def kept_layers(num_layers: int) -> tuple[int, ...]:
    """As the paper's code has them, where there are layers enough."""
    usual = (2, num_layers // 2, num_layers - 3)
    return usual if num_layers > 5 else tuple(range(1, num_layers + 1))[-3:]


def make_head(
    config: dict[str, Any],
    states: ModelStates,
    token_ids: NDArray[np.int64],
    scales: Sequence[float],
) -> Eagle3Head:
    """It begins near the model: with its output matrix and norm, and the deepest of its states."""
    model = states.config
    embedding = states.read("model.embed_tokens.weight", model.vocab_size, model.hidden_size)
    head = Eagle3Head(config, embedding, scales, len(token_ids))
    size = model.hidden_size
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -size:] = torch.eye(size)
        head.output.weight.copy_(torch.from_numpy(states.output_rows(token_ids)))
        head.norm.copy_(torch.from_numpy(states.read("model.norm.weight", size)))
    return head


def scales_of(examples: Sequence[Example], count: int) -> list[float]:
    """With which the states of `count` layers are about one in size: they grow from layer to layer,
    and a step of the optimizer would be too long for large ones."""
    sizes = [
        torch.stack(
            [part.square().mean(-1).sqrt() for part in one.states.float().chunk(count, dim=-1)]
        )
        for one in examples
    ]
    return [1 / max(float(size), 1e-6) for size in torch.cat(sizes, dim=1).median(dim=1).values]


# -- training -------------------------------------------------------------------------------------


def fit(
    head: Eagle3Head, examples: Sequence[Example], columns: NDArray[np.int64], *,
    depth: int, epochs: int, batch: int, rate: float, seed: int,
) -> None:  # fmt: skip
    """`batch`: answers in a step."""
    columns_of = torch.from_numpy(columns)
    num_steps = epochs * -(-len(examples) // batch)
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=num_steps + 1, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    for epoch in range(epochs):
        total = 0.0
        order = torch.randperm(len(examples), generator=generator).tolist()
        for step, first in enumerate(range(0, len(order), batch), 1):
            chosen = [examples[index] for index in order[first : first + batch]]
            loss = loss_of(head, chosen, columns_of, depth)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
            if step % 20 == 0 or first + batch >= len(order):
                say(f"epoch {epoch + 1}, step {step}: mean loss {total / step:.3f}, "
                    f"{time.perf_counter() - started:.0f} s")  # fmt: skip


def loss_of(head: Eagle3Head, batch: Sequence[Example], columns: Tensor, depth: int) -> Tensor:
    """Of the token that was written at each place, and of the model's distribution there."""
    loss = torch.zeros(())
    with torch.autocast("cpu", torch.bfloat16):
        for number, logits in enumerate(head.passes(batch, depth)):
            rows, wanted, likeliest, shares = _targets(batch, columns, number)
            logs = logits[rows].float().log_softmax(dim=-1)
            known = (wanted != NO_TARGET).nonzero()[:, 0]
            written = -logs[known, wanted[known]].sum()
            whole = -(logs.gather(1, likeliest) * shares).sum()
            mean = (WRITTEN * written + (1 - WRITTEN) * whole) / max(1, len(rows))
            loss = loss + DECAY**number * mean
    return loss


def _targets(
    batch: Sequence[Example], columns: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of a pass's logits whose token was written, its column, and the likeliest ones'."""
    rows, wanted, likeliest, shares = [], [], [], []
    start = 0
    for one in batch:
        count = len(one.states) - one.first
        # Anchor i stands before token i + 1 of the answer; its pass k is of token i + 1 + k.
        left = max(0, count - 1 - number)
        rows.append(torch.arange(start, start + left))
        wanted.append(columns[one.token_ids[one.first + 2 + number :][:left]])
        likeliest.append(one.likeliest[1 + number :][:left])
        shares.append(one.shares[1 + number :][:left])
        start += count
    return torch.cat(rows), torch.cat(wanted), torch.cat(likeliest), torch.cat(shares)


def score(
    head: Eagle3Head, examples: Sequence[Example], columns: NDArray[np.int64], depth: int
) -> Score:
    """A token that the head has no logits for, and the end of an answer, count as wrong."""
    columns_of, right = torch.from_numpy(columns), []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for one in examples:
            found = np.zeros((depth, len(one.states) - one.first), bool)
            for number, logits in enumerate(head.passes([one], depth)):
                rows, wanted, *_ = _targets([one], columns_of, number)
                found[number, : len(rows)] = (logits[rows].argmax(-1) == wanted).numpy()
            right.append(found)
    return Score.of(np.concatenate(right, axis=1))


def write_head(
    folder: Path, head: Eagle3Head, config: dict[str, Any], token_ids: NDArray[np.int64]
) -> None:
    """As such heads are published."""
    sizes = [head.num_heads, head.num_kv_heads, head.num_kv_heads]
    q, k, v = torch.split(head.qkv.weight, [size * head.head_dim for size in sizes])
    gate, up = head.gate_up.weight.chunk(2)
    own = {
        "fc.weight": head.fc.weight * head.scales,
        "midlayer.input_layernorm.weight": head.embedding_norm,
        "midlayer.hidden_norm.weight": head.state_norm,
        "midlayer.post_attention_layernorm.weight": head.mlp_norm,
        "midlayer.self_attn.q_proj.weight": q,
        "midlayer.self_attn.k_proj.weight": k,
        "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.o_proj.weight": head.attention_out.weight,
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": head.down.weight,
        "norm.weight": head.norm,
        "lm_head.weight": head.output.weight,
    }
    tensors = {name: one.detach().bfloat16().contiguous() for name, one in own.items()}
    is_known = torch.zeros(config["vocab_size"], dtype=torch.bool)
    is_known[torch.from_numpy(token_ids)] = True
    tensors["t2d"] = is_known
    tensors["d2t"] = torch.from_numpy(token_ids - np.arange(len(token_ids)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors")
