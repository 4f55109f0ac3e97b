"""Medusa heads for a model, trained on this machine's CPU on what the model itself writes.

    python -m benchmarks.medusa train HEADS [--model MODEL]     (needs torch: pip install torch)
    python -m benchmarks.medusa measure HEADS [--model MODEL]

`train` has the model make up questions and answer them, so that no text is needed (or answers
--questions, one a line), takes the hidden states of its answers, fits the heads to the tokens that
came next, and writes them in the form that `octavo serve` and vLLM read:

    octavo serve MODEL --speculative-config '{"method": "medusa", "model": "HEADS"}'

It prints how often each head is right on answers that it was not trained on, and the acceptance
length: tokens a step yields if all heads are asked. `measure` answers questions one at a time, with
the heads and without in turn, and prints the gain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo import LLM, SamplingParams
from octavo_engine.backends.backend import BackendLimits, BackendStep
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.draft_files import open_weights
from octavo_engine.backends.head_files import HeadsPart
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.config import BLOCK_SIZE, EngineConfig
from octavo_engine.core.engine import Engine
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.medusa import MedusaConfig
from octavo_engine.weights.dummy import DummyCheckpoint
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

MAX_LEN = 1024  # tokens of a question and its answer
KV_BYTES = 512 << 20
HELD_OUT = 16  # every so manieth answer is not trained on
DECAY = 0.8  # of a head's weight in the loss, to the head before it
NO_TARGET = -1


class Answer(NamedTuple):
    token_ids: list[int]  # of the prompt and what the model wrote
    num_prompt_tokens: int


class Examples(NamedTuple):
    """Hidden states, and the tokens that came 2, 3, … places behind them."""

    hidden: NDArray[np.float16]  # [N, hidden]
    targets: NDArray[np.int64]  # [N, heads]; NO_TARGET: the answer had ended


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# -- what the model writes ------------------------------------------------------------------------


def made_up_questions(llm: LLM, count: int, *, seed: int) -> list[str]:
    """As a user would write them, where the model says how its chats go."""
    if llm.get_tokenizer().chat_template is None:
        return []
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=64, seed=seed + index)
        for index in range(count)
    ]
    # Told that a user's message has begun, it goes on with one.
    opened = [[{"role": "user", "content": ""}]] * count
    outputs = llm.chat(
        opened, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    texts = (output.outputs[0].text.strip() for output in outputs)
    return list(dict.fromkeys(text for text in texts if text))


def answers_to(llm: LLM, questions: Sequence[str], *, max_tokens: int, seed: int) -> list[Answer]:
    """Half of them greedy, half of them sampled: that is how they will be asked for."""
    params = [
        SamplingParams(temperature=0.8 * (index % 2), max_tokens=max_tokens, seed=seed + index)
        for index in range(len(questions))
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [
        Answer([*(output.prompt_token_ids or []), *output.outputs[0].token_ids],
               len(output.prompt_token_ids or []))
        for output in outputs
    ]  # fmt: skip


# -- hidden states --------------------------------------------------------------------------------


class HiddenStates:
    """Those that a served model would have: of its own weights, in its own arithmetic."""

    def __init__(self, model: str, *, num_threads: int | None = None) -> None:
        settings = EngineConfig(model=model, device="cpu")
        files = resolve_model(model)
        self.config = ModelConfig.from_hf(files.config)
        self.checkpoint = open_weights(settings, self.config, files)
        sizes = {"hidden_size": self.config.hidden_size, "vocab_size": self.config.vocab_size}
        # A set of no heads: the backend keeps what heads would read.
        nothing = HeadsPart(MedusaConfig.from_hf(sizes), DummyCheckpoint(), 0)
        self._backend = NativeBackend(
            self.config,
            self.checkpoint,
            max_model_len=MAX_LEN,
            num_threads=num_threads,
            heads=nothing,
        )
        limits = BackendLimits(
            max_tokens=MAX_LEN, max_seqs=1, max_logit_rows=MAX_LEN, max_model_len=MAX_LEN
        )
        self._num_groups = len(self._backend.cache_layout.groups)
        self._backend.prepare(limits, self._num_groups * MAX_LEN // BLOCK_SIZE)

    def of(self, answer: Answer) -> NDArray[np.float32]:
        """Of each token that the model wrote the state that it was sampled from."""
        count = len(answer.token_ids) - 1
        positions = np.arange(count, dtype=np.int32)
        first = np.arange(self._num_groups, dtype=np.int32) * (MAX_LEN // BLOCK_SIZE)
        blocks = np.arange(MAX_LEN // BLOCK_SIZE, dtype=np.int32)
        step = BackendStep(
            token_ids=np.array(answer.token_ids[:-1], np.int32),
            positions=positions,
            slots=first[:, None] * BLOCK_SIZE + positions,
            seq_starts=np.array([0, count], np.int32),
            seq_lens=np.array([count], np.int32),
            rows=np.zeros(1, np.int32),
            block_tables=(first[:, None] + blocks)[:, None],
            logit_rows=positions[answer.num_prompt_tokens - 1 :],
            copies=np.zeros((0, 3), np.int32),
        )
        self._backend.logits(step)
        return self._backend.hidden_rows(np.arange(len(step.logit_rows), dtype=np.int32))

    def output_rows(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of the model's own output matrix."""
        tied = self.config.tie_word_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        shape = (self.config.vocab_size, self.config.hidden_size)
        return to_float32(self.checkpoint.read(name, shape))[token_ids]

    def close(self) -> None:
        self._backend.close()


def examples_of(states: HiddenStates, answers: Sequence[Answer], num_heads: int) -> Examples:
    """State i samples token i of the answer; head k is to guess token i + 1 + k."""
    hidden, targets = [], []
    for answer in answers:
        written = np.array(answer.token_ids[answer.num_prompt_tokens :], np.int64)
        if len(written) < 2:
            continue
        hidden.append(states.of(answer).astype(np.float16))
        padded = np.concatenate([written, np.full(num_heads + 1, NO_TARGET)])
        targets.append(
            np.stack([padded[1 + head :][: len(written)] for head in range(num_heads)], axis=1)
        )
    return Examples(np.concatenate(hidden), np.concatenate(targets))


# -- heads ----------------------------------------------------------------------------------------


def common_tokens(answers: Sequence[Answer], count: int, vocab_size: int) -> NDArray[np.int64]:
    """The most frequent ones; all, where there are no more than that."""
    if count >= vocab_size:
        return np.arange(vocab_size)
    seen = Counter(token for answer in answers for token in answer.token_ids)
    frequent = [token for token, _ in seen.most_common(count)]
    rest = (token for token in range(vocab_size) if token not in seen)
    return np.sort(np.array([*frequent, *(next(rest) for _ in range(count - len(frequent)))]))


def make_heads(num_heads: int, output: NDArray[np.float32]) -> nn.ModuleList:
    """Each begins as the model's own head: a residual layer that adds nothing, then the matrix."""
    import torch
    from torch import nn

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
    from torch.nn import functional

    layer, last = head.get_submodule("layer"), head.get_submodule("last")
    logits: Tensor = last(hidden + functional.silu(layer(hidden)))
    return logits


def fit(
    heads: nn.ModuleList, examples: Examples, *, epochs: int, batch: int, rate: float, seed: int
) -> None:
    """Targets are columns of the heads' logits."""
    import torch
    from torch.nn import functional

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


class Score(NamedTuple):
    right: list[float]  # how often each head is
    acceptance_length: float  # tokens of a step, where each head counts if all before it are right


def score(heads: nn.ModuleList, examples: Examples) -> Score:
    import torch

    right = []
    with torch.inference_mode():
        for number, head in enumerate(heads):
            guesses = [
                head_logits(head, part.float()).argmax(-1)
                for part in _batches(torch.from_numpy(examples.hidden), 1024)
            ]
            right.append(torch.cat(guesses).numpy() == examples.targets[:, number])
    accepted = np.logical_and.accumulate(np.stack(right), axis=0).sum(axis=0)
    return Score([float(one.mean()) for one in right], 1 + float(accepted.mean()))


def write_heads(
    folder: Path, heads: nn.ModuleList, token_ids: NDArray[np.int64], vocab_size: int
) -> None:
    """In vLLM's form."""
    import torch
    from safetensors.torch import save_file

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


# -- commands -------------------------------------------------------------------------------------


def collect(args: argparse.Namespace) -> list[Answer]:
    with LLM(args.model, max_model_len=MAX_LEN, kv_cache_memory_bytes=KV_BYTES) as llm:
        started = time.perf_counter()
        questions = read_questions(llm, args)
        answers = answers_to(llm, questions, max_tokens=args.max_tokens, seed=args.seed)
        count = sum(len(answer.token_ids) - answer.num_prompt_tokens for answer in answers)
        say(f"{len(questions)} questions, {count} tokens of answers, "
            f"{time.perf_counter() - started:.0f} s")  # fmt: skip
    return answers


def read_questions(llm: LLM, args: argparse.Namespace) -> list[str]:
    """Of the file, or made up."""
    if args.questions is not None:
        lines = args.questions.read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip()][: args.count]
    questions = made_up_questions(llm, args.count, seed=args.seed)
    if not questions:
        raise SystemExit("The model has no chat template to make up questions by: --questions FILE")
    return questions


def train(args: argparse.Namespace) -> Score:
    answers = collect(args)
    states = HiddenStates(args.model)
    token_ids = common_tokens(answers, args.tokens, states.config.vocab_size)
    columns = np.full(states.config.vocab_size + 1, NO_TARGET)  # the last is NO_TARGET's own
    columns[token_ids] = np.arange(len(token_ids))
    parts = []
    for is_held_out in (False, True):
        chosen = [a for i, a in enumerate(answers) if (i % HELD_OUT == HELD_OUT - 1) == is_held_out]
        examples = examples_of(states, chosen, args.heads)
        parts.append(examples._replace(targets=columns[examples.targets]))
    heads = make_heads(args.heads, states.output_rows(token_ids))
    states.close()
    fit(heads, parts[0], epochs=args.epochs, batch=args.batch, rate=args.rate, seed=args.seed)
    write_heads(args.folder, heads, token_ids, states.config.vocab_size)
    # A token that no head knows, and the end of an answer, count as wrong.
    held_out = parts[1]._replace(targets=np.where(parts[1].targets < 0, -2, parts[1].targets))
    result = score(heads, held_out)
    rights = ", ".join(f"{right:.1%}" for right in result.right)
    say(f"{len(held_out.hidden)} tokens that were not trained on: heads right {rights}; "
        f"acceptance length {result.acceptance_length:.2f}")  # fmt: skip
    return result


class Run(NamedTuple):
    tokens_per_s: float
    acceptance_length: float  # tokens of a step that had drafts; 1 where none had
    token_ids: list[list[int]]


def timed_run(args: argparse.Namespace, llm: LLM, questions: Sequence[str]) -> Run:
    """One question at a time."""
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=1)
    engine = llm._engine
    assert isinstance(engine, Engine)
    before = engine.stats()
    llm.reset_prefix_cache()
    started, token_ids = time.perf_counter(), []
    for question in questions:
        (output,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
        token_ids.append(list(output.outputs[0].token_ids))
    seconds = time.perf_counter() - started
    after = engine.stats()
    drafts = after.spec_drafts - before.spec_drafts
    accepted = after.spec_accepted_tokens - before.spec_accepted_tokens
    length = 1 + accepted / drafts if drafts else 1.0
    return Run(sum(map(len, token_ids)) / seconds, length, token_ids)


def measure(args: argparse.Namespace) -> None:
    speculation = {
        "method": "medusa",
        "model": str(args.folder),
        "num_speculative_tokens": args.heads,
        "quantization": args.quantization,
    }
    engines = [
        LLM(args.model, max_model_len=MAX_LEN, kv_cache_memory_bytes=KV_BYTES,
            speculative_config=config)
        for config in (None, speculation)
    ]  # fmt: skip
    questions = read_questions(engines[0], args)
    for llm in engines:  # what steps take is learnt before it is timed
        timed_run(args, llm, questions[:2])
    gains = []
    for pair in range(args.pairs):
        plain, drafted = (timed_run(args, llm, questions) for llm in engines)
        if plain.token_ids != drafted.token_ids:
            raise SystemExit("The answers differ; they must not.")
        gains.append(drafted.tokens_per_s / plain.tokens_per_s)
        say(
            f"pair {pair + 1}: {plain.tokens_per_s:.0f} and {drafted.tokens_per_s:.0f} tokens/s, "
            f"{gains[-1]:.2f} times as fast; acceptance length {drafted.acceptance_length:.2f}"
        )
    say(f"median: {statistics.median(gains):.2f} times as fast")
    for llm in engines:
        llm.close()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("train", "measure"))
    parser.add_argument("folder", type=Path, help="of the heads")
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--questions", type=Path, help="a file with one a line")
    parser.add_argument(
        "--count", type=int, help="questions; default: 2000 to train, 12 to measure"
    )
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192, help="that heads can draft")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, help="default: 0 to train, another one to measure")
    parser.add_argument("--pairs", type=int, default=5, help="of runs to measure")
    parser.add_argument("--temperature", type=float, default=0.0, help="of measured answers")
    parser.add_argument("--quantization", default="auto", help="of the heads that are measured")
    args = parser.parse_args(argv)
    is_training = args.command == "train"
    if args.count is None:
        args.count = 2000 if is_training else 12
    if args.seed is None:
        args.seed = 0 if is_training else 1_000_000
    return args


def main() -> None:
    args = parse()
    if args.command == "train":
        train(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
