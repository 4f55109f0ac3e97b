"""From a model to the files of a head, on the CPU: what it writes, its states, the fit, a score."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.speculation import eagle3, medusa
from benchmarks.speculation.answers import common_tokens, split_answers, write_answers
from benchmarks.speculation.reporting import say
from benchmarks.speculation.score import NO_TARGET
from benchmarks.speculation.states import ModelStates

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from benchmarks.speculation.answers import Answer
    from benchmarks.speculation.score import Score


def train(args: argparse.Namespace) -> Score:
    """Files of heads in `args.folder`, and how good they are on answers kept for that."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.answers if args.answers is not None else args.folder / "answers.jsonl"
    answers = write_answers(
        args.model, file, args.count, questions=args.questions, max_tokens=args.max_tokens,
        seed=args.seed, num_threads=args.threads, activation_bits=args.activation_bits,
    )  # fmt: skip
    count = sum(len(answer.token_ids) - answer.num_prompt_tokens for answer in answers)
    say(f"{len(answers)} answers, {count} tokens")
    started = time.perf_counter()
    result = (_train_medusa if args.method == "medusa" else _train_eagle3)(args, answers)
    say(f"On answers that were not trained on: {result.describe()}. "
        f"Trained in {time.perf_counter() - started:.0f} s.")  # fmt: skip
    return result


def columns_of(token_ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Of a head's logits, by token."""
    columns = np.full(vocab_size, NO_TARGET)
    columns[token_ids] = np.arange(len(token_ids))
    return columns


def _train_medusa(args: argparse.Namespace, answers: Sequence[Answer]) -> Score:
    states = ModelStates(args.model, num_threads=args.threads, activation_bits=args.activation_bits)
    vocab_size = states.config.vocab_size
    token_ids = common_tokens(answers, args.tokens, vocab_size)
    columns = np.append(columns_of(token_ids, vocab_size), NO_TARGET)  # the last is of NO_TARGET
    parts = []
    for some in split_answers(answers):
        examples = medusa.examples_of(states, some, args.depth)
        parts.append(examples._replace(targets=columns[examples.targets]))
    heads = medusa.make_heads(args.depth, states.output_rows(token_ids))
    states.close()
    medusa.fit(heads, parts[0], epochs=args.epochs, batch=64 * args.batch, rate=args.rate,
               seed=args.seed)  # fmt: skip
    medusa.write_heads(args.folder, heads, token_ids, vocab_size)
    return medusa.score(heads, parts[1])


def _train_eagle3(args: argparse.Namespace, answers: Sequence[Answer]) -> Score:
    states = ModelStates(
        args.model, kept_layers=eagle3.kept_layers, num_threads=args.threads,
        activation_bits=args.activation_bits,
    )  # fmt: skip
    vocab_size = states.config.vocab_size
    token_ids = common_tokens(answers, args.tokens, vocab_size)
    columns = columns_of(token_ids, vocab_size)
    config = eagle3.head_config(states, len(token_ids))
    started = time.perf_counter()
    to_fit, to_score = (
        [eagle3.example_of(states, answer) for answer in some] for some in split_answers(answers)
    )
    say(f"{sum(len(one.states) for one in to_fit)} positions, "
        f"{time.perf_counter() - started:.0f} s")  # fmt: skip
    head, teacher = eagle3.make_head(config, states, token_ids, to_fit)
    states.close()
    eagle3.fit(head, teacher, to_fit, columns, depth=args.depth, epochs=args.epochs,
               batch=args.batch, rate=args.rate, seed=args.seed,
               seconds=60 * args.minutes)  # fmt: skip
    eagle3.write_head(args.folder, head, config, token_ids)
    return eagle3.score(head, to_score, columns, args.depth)
