"""An EAGLE-3 head in torch: its passes over whole answers, what it learns, and its files.

A row is a position: the model's states there and the token behind it; its logits are of the token
after that. At the second pass the head's own state stands in for the model's, as when it drafts the
second token, and so on: so it learns from its own states, too (the paper's training-time test).

Positions where nothing is drafted, those of the prompt, only have keys and values. The places that
it drafts from are called anchors.
"""

from __future__ import annotations

import json
import math
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
WRITTEN = 0.3  # weight of the token that was written, beside the model's own distribution
CLOSENESS = 1.0  # weight of how far the head's last state is from the model's
RIDGE = 1e-3  # of the mean square of what a first guess is solved from
FOCUS = 3.5  # of attention on its own position, from each fast pair
FAST_PAIRS = 4  # of a query's numbers: those that turn most from one position to the next
OUTPUT_RATE = 0.2  # of the learning rate: of the output matrix and the norms
SOLVED_FROM = 200  # answers
PROMPT_TAIL = 48  # positions of a prompt that are kept: a head looks little further back
WARM_UP_STEPS = 20
_F16_MAX = 65504.0  # some models have single values beyond it


class Example(NamedTuple):
    """One answer."""

    states: Tensor  # [T, states of several layers, and behind all layers], float16
    token_ids: Tensor  # [T + 1], those of the prompt, too
    first: int  # anchor: where the first token of the answer is behind

    @property
    def num_anchors(self) -> int:
        return len(self.states) - self.first


class Teacher(NamedTuple):
    """The model's own end: what its last states say."""

    norm: Tensor
    output: Tensor  # of the head's tokens
    eps: float

    def normed(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states.float(), (states.shape[-1],), self.norm, self.eps)


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
        self.q = linear(2 * size, q_size)
        self.k, self.v = linear(2 * size, kv_size), linear(2 * size, kv_size)
        self.attention_out = linear(q_size, size)
        self.gate_up, self.down = linear(size, 2 * width), linear(width, size)
        self.output = linear(size, num_out)

    def passes(self, batch: Sequence[Example], count: int) -> Iterator[Tensor]:
        """The head's own states of each pass at all anchors; the rows of the k-th that lie beyond
        an answer's end mean nothing."""
        rows = Rows.of(batch, len(self.scales))
        state = self.joined(rows.states)
        seen = Seen(rows, self.num_heads // self.num_kv_heads)
        for number in range(count):
            if number == 0:
                ids = rows.next_ids(0, all_rows=True)
                state = self.layer(ids, state, rows.positions, seen, rows.anchors)
            else:
                positions = rows.positions[rows.anchors] + number
                state = self.layer(rows.next_ids(number), state, positions, seen)
            yield state

    def joined(self, states: Tensor) -> Tensor:
        """The model's states of several layers as one of the head's."""
        return self.joined_scaled(states * self.scales)

    def joined_scaled(self, states: Tensor) -> Tensor:
        result: Tensor = self.fc(states)
        return result

    def layer(
        self,
        token_ids: Tensor,
        state: Tensor,
        positions: Tensor,
        seen: Seen,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """`wanted`: the rows that more than keys and values are made of; None: all."""
        both = self.inputs(token_ids, state)
        q, k, v = (
            one(both).float().unflatten(-1, (-1, self.head_dim)) for one in (self.q, self.k, self.v)
        )
        q, k = (self._turned(one, positions) for one in (q, k))
        attended = seen.attend(q, k, v).flatten(1)
        if wanted is not None:
            attended, state = attended[wanted], state[wanted]
        x = state + self.attention_out(attended)
        gate, up = self.gate_up(self._normed(x, self.mlp_norm)).chunk(2, dim=-1)
        return torch.add(x, self.down(functional.silu(gate) * up))

    def inputs(self, token_ids: Tensor, state: Tensor) -> Tensor:
        embedding = self._normed(self.embedding[token_ids].float(), self.embedding_norm)
        return torch.cat([embedding, self._normed(state, self.state_norm)], dim=-1)

    def last(self, state: Tensor) -> Tensor:
        """What logits are made of."""
        return self._normed(state, self.norm)

    def logits(self, state: Tensor) -> Tensor:
        result: Tensor = self.output(self.last(state))
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
    def of(cls, batch: Sequence[Example], size: int) -> Rows:
        """`size`: of what the head sees of the states."""
        lengths = [len(one.states) for one in batch]
        positions = torch.cat([torch.arange(length) for length in lengths])
        firsts = torch.tensor([one.first for one in batch])
        is_anchor = positions >= firsts.repeat_interleave(torch.tensor(lengths))
        return cls(
            torch.cat([one.states[:, :size].float() for one in batch]),
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


def example_of(states: ModelStates, answer: Answer) -> Example:
    start = max(0, answer.num_prompt_tokens - 1 - PROMPT_TAIL)
    kept = states.layers(answer)[start:]
    return Example(
        torch.from_numpy(np.clip(kept, -_F16_MAX, _F16_MAX).astype(np.float16)),
        torch.tensor(answer.token_ids[start:]),
        answer.num_prompt_tokens - 1 - start,
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
        "num_key_value_heads": model.num_heads,  # each with values of its own: one layer has to do
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rope.theta,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": num_tokens,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(kept_layers(count)[:-1]),
    }


def kept_layers(num_layers: int) -> tuple[int, ...]:
    """The head's three, and all: what it is to guess."""
    seen = (2, num_layers // 2, num_layers - 1) if num_layers > 5 else range(1, num_layers + 1)[-3:]
    return (*seen, num_layers)


def make_head(
    config: dict[str, Any],
    states: ModelStates,
    token_ids: NDArray[np.int64],
    examples: Sequence[Example],
) -> tuple[Eagle3Head, Teacher]:
    """It begins near the model, by two linear equations: of the state behind all layers from those
    that it sees, and of the next position's from that and the token between them.

    The second goes through attention that begins with each position seeing itself.
    """
    model = states.config
    size = model.hidden_size
    scales = scales_of(examples[:SOLVED_FROM], len(kept_layers(model.num_layers)))
    embedding = states.read("model.embed_tokens.weight", model.vocab_size, size)
    head = Eagle3Head(config, embedding, scales[:-1], len(token_ids))
    norm = torch.from_numpy(states.read("model.norm.weight", size))
    output = torch.from_numpy(states.output_rows(token_ids))
    with torch.no_grad():
        head.output.weight.copy_(output)
        head.norm.copy_(norm)
        nn.init.zeros_(head.down.weight)
        _solve(head, examples[:SOLVED_FROM], scales[-1])
    return head, Teacher(norm, output.bfloat16(), head.eps)


def _solve(head: Eagle3Head, examples: Sequence[Example], unit: float) -> None:
    size = len(head.norm)
    seen = torch.cat([one.states[one.first : -1, :-size] for one in examples]).float() * head.scales
    here = torch.cat([one.states[one.first : -1, -size:] for one in examples]).float() * unit
    there = torch.cat([one.states[one.first + 1 :, -size:] for one in examples]).float() * unit
    token_ids = torch.cat([one.token_ids[one.first + 1 : -1] for one in examples])
    head.fc.weight.copy_(_solved(seen, here))
    state = head.joined_scaled(seen)
    inputs = head.inputs(token_ids, state)
    # The difference to the next state, through as many numbers as the values have.
    left, factors, right = torch.linalg.svd(_solved(inputs, there - state))
    count = min(size, len(head.v.weight))
    roots = factors[:count].sqrt()
    nn.init.zeros_(head.v.weight)
    nn.init.zeros_(head.attention_out.weight)
    head.v.weight[:count] = roots[:, None] * right[:count]
    head.attention_out.weight[:, :count] = left[:, :count] * roots
    # Queries and keys that are alike at all positions: only the turn between them counts.
    common = inputs.mean(dim=0)
    common[:size] = 0
    reach = (FOCUS * head.head_dim**0.5) ** 0.5 / common.square().sum()
    for weight in (head.q.weight, head.k.weight):
        for pair in range(min(FAST_PAIRS, head.head_dim // 2)):
            weight[pair :: head.head_dim] = common * reach


def _solved(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The linear layer from these to those."""
    squares = inputs.T @ inputs
    squares += RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
    result: Tensor = torch.linalg.solve(squares, inputs.T @ outputs).T
    return result


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
    head: Eagle3Head, teacher: Teacher, examples: Sequence[Example], columns: NDArray[np.int64], *,
    depth: int, epochs: int, batch: int, rate: float, seed: int, seconds: float = math.inf,
) -> None:  # fmt: skip
    """`batch`: answers in a step. The first half of it learns the first pass alone: what a later
    one sees is of use only when that is good. `seconds`: it ends then, if that is before `epochs`
    are over."""
    columns_of = torch.from_numpy(columns)
    num_steps = epochs * -(-len(examples) // batch)
    optimizers = _optimizers(head, rate)
    generator = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    order: list[int] = []
    mean, done = math.nan, 0.0
    for step in range(num_steps):
        if len(order) < batch:
            order += torch.randperm(len(examples), generator=generator).tolist()
        chosen, order = [examples[index] for index in order[:batch]], order[batch:]
        passed = time.perf_counter() - started
        done = max(step / num_steps, passed / seconds)
        if done >= 1:
            break
        share = min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - done)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * share
            optimizer.zero_grad()
        loss = loss_of(head, teacher, chosen, columns_of, 1 if done < 0.5 else depth)
        loss[0].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        now = float(loss[1])
        mean = now if step == 0 else mean + (now - mean) / min(20, step + 1)
        if step % 20 == 19 or step == num_steps - 1:
            say(f"step {step + 1} of {num_steps}: right {mean:.1%}, {passed:.0f} s")


def _optimizers(head: Eagle3Head, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between states; it needs far fewer answers than AdamW alone."""
    matrices = [
        one.weight
        for one in (head.fc, head.q, head.k, head.v, head.attention_out, head.gate_up, head.down)
    ]
    chosen = {id(one) for one in matrices}
    rest = [one for one in head.parameters() if id(one) not in chosen]
    found = [
        torch.optim.Muon(matrices, rate, weight_decay=0.01, ns_steps=4,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, OUTPUT_RATE * rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]  # fmt: skip
    for optimizer in found:
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return found


def loss_of(
    head: Eagle3Head, teacher: Teacher, batch: Sequence[Example], columns: Tensor, depth: int
) -> tuple[Tensor, float]:
    """Of the model's distribution at each place, of the token that was written there, and of the
    state itself; and how often the first pass's best token is the one that was written."""
    loss, right = torch.zeros(()), 0.0
    size = len(teacher.norm)
    with torch.autocast("cpu", torch.bfloat16):
        known = teacher.normed(
            torch.cat([one.states[one.first :, -size:].float() for one in batch])
        )
        shares = functional.linear(known, teacher.output).float().softmax(dim=-1)
        for number, state in enumerate(head.passes(batch, depth)):
            rows, wanted = _targets(batch, columns, number)
            behind = rows + 1 + number  # the place whose state and token it guesses
            last = head.last(state[rows])
            logits = head.output(last).float()
            logs = logits.log_softmax(dim=-1)
            is_known = wanted != NO_TARGET
            written = logs.gather(1, wanted.clamp(min=0)[:, None])[:, 0] * is_known
            whole = torch.linalg.vecdot(logs, shares[behind])
            far = (last - known[behind]).square().sum(-1) / known[behind].square().sum(-1)
            each = CLOSENESS * far - WRITTEN * written - (1 - WRITTEN) * whole
            loss = loss + DECAY**number * each.mean()
            if number == 0:
                right = float((logits.argmax(-1) == wanted).float().mean())
    return loss, right


def _targets(batch: Sequence[Example], columns: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Anchors behind which a pass guesses a token that was written, and that token's column."""
    rows, wanted = [], []
    start = 0
    for one in batch:
        # Anchor i stands before token i + 1 of the answer; its pass k is of token i + 1 + k.
        left = max(0, one.num_anchors - 1 - number)
        rows.append(torch.arange(start, start + left))
        wanted.append(columns[one.token_ids[one.first + 2 + number :][:left]])
        start += one.num_anchors
    return torch.cat(rows), torch.cat(wanted)


def score(
    head: Eagle3Head, examples: Sequence[Example], columns: NDArray[np.int64], depth: int
) -> Score:
    """A token that the head has no logits for, and the end of an answer, count as wrong."""
    columns_of, right = torch.from_numpy(columns), []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for one in examples:
            found = np.zeros((depth, one.num_anchors), bool)
            for number, state in enumerate(head.passes([one], depth)):
                rows, wanted = _targets([one], columns_of, number)
                found[number, : len(rows)] = (head.logits(state[rows]).argmax(-1) == wanted).numpy()
            right.append(found)
    return Score.of(np.concatenate(right, axis=1))


def write_head(
    folder: Path, head: Eagle3Head, config: dict[str, Any], token_ids: NDArray[np.int64]
) -> None:
    """As such heads are published."""
    gate, up = head.gate_up.weight.chunk(2)
    own = {
        "fc.weight": head.fc.weight * head.scales,
        "midlayer.input_layernorm.weight": head.embedding_norm,
        "midlayer.hidden_norm.weight": head.state_norm,
        "midlayer.post_attention_layernorm.weight": head.mlp_norm,
        "midlayer.self_attn.q_proj.weight": head.q.weight,
        "midlayer.self_attn.k_proj.weight": head.k.weight,
        "midlayer.self_attn.v_proj.weight": head.v.weight,
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
