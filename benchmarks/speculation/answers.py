"""What a model itself writes: the text that its heads learn from."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.speculation.prompts import Request, requests
from benchmarks.speculation.reporting import say
from octavo import LLM, SamplingParams, structured_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MAX_LEN = 1024  # tokens of a request and its answer
KV_BYTES = 512 << 20
PART = 96  # requests that are answered together and stored
HELD_OUT = 15  # every so manieth answer is not trained on: odd, as every other one is sampled
SHARES = {"chat": 5, "code": 3, "json": 2, "summaries": 2}  # of 20; the rest is made up


class Answer(NamedTuple):
    token_ids: list[int]  # of the prompt and what the model wrote
    num_prompt_tokens: int


def made_up_questions(llm: LLM, count: int, *, seed: int) -> list[str]:
    """As a user would write them, where the model says how its chats go."""
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=64, seed=seed + index)
        for index in range(count)
    ]
    # Where a user's message has begun, it goes on with one.
    opened = [[{"role": "user", "content": ""}]] * count
    outputs = llm.chat(
        opened, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    texts = (output.outputs[0].text.strip() for output in outputs)
    return list(dict.fromkeys(text for text in texts if text))


def training_requests(llm: LLM, count: int, *, seed: int) -> list[Request]:
    """Of all kinds but noise, mixed, each once."""
    if llm.get_tokenizer().chat_template is None:
        raise SystemExit("The model has no chat template to make up questions by: --questions FILE")
    by_text: dict[str, Request] = {}
    for kind, share in SHARES.items():
        some = requests(kind, count * share // 20, seed=seed, held_out=False)
        by_text |= {request.content: request for request in some}
    questions = made_up_questions(llm, count - len(by_text), seed=seed)
    by_text |= {question: Request("chat", question) for question in questions}
    found = list(by_text.values())
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[index] for index in order]


def answer(llm: LLM, part: Sequence[Request], params: Sequence[SamplingParams]) -> list[Answer]:
    chats = [[{"role": "user", "content": request.content}] for request in part]
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [
        Answer([*(output.prompt_token_ids or []), *output.outputs[0].token_ids],
               len(output.prompt_token_ids or []))
        for output in outputs
    ]  # fmt: skip


def params_of(
    request: Request, *, max_tokens: int, temperature: float, seed: int
) -> SamplingParams:
    grammar = None if request.schema is None else structured_output(json=request.schema)
    return SamplingParams(
        temperature=temperature, max_tokens=max_tokens, seed=seed, grammar=grammar
    )


def write_answers(
    model: str, file: Path, count: int, *, questions: Path | None, max_tokens: int, seed: int,
    num_threads: int | None = None, activation_bits: int = 16,
) -> list[Answer]:  # fmt: skip
    """Answers to so many requests, half of them greedy and half sampled, as users want them.

    They are stored part by part, so that what was interrupted goes on where it was.
    """
    found = list(read_answers(file)) if file.exists() else []
    if len(found) >= count:
        return found[:count]
    started, before = time.perf_counter(), len(found)
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": KV_BYTES,
        "num_threads": num_threads,
        "activation_bits": activation_bits,
    }
    with LLM(model, max_model_len=MAX_LEN, **settings) as llm:
        if questions is None:
            wanted = training_requests(llm, count, seed=seed)
        else:
            lines = questions.read_text(encoding="utf-8").splitlines()
            wanted = [Request("chat", line.strip()) for line in lines if line.strip()][:count]
        for first in range(before, len(wanted), PART):
            part = wanted[first : first + PART]
            params = [
                params_of(request, max_tokens=max_tokens, temperature=0.8 * (index % 2),
                          seed=seed + index)
                for index, request in enumerate(part, first)
            ]  # fmt: skip
            new = answer(llm, part, params)
            with file.open("a", encoding="utf-8") as lines_out:
                lines_out.writelines(json.dumps(one) + "\n" for one in new)
            found += new
            say(f"{len(found)} of {len(wanted)} answers, {time.perf_counter() - started:.0f} s")
    return found


def read_answers(file: Path) -> Iterator[Answer]:
    """Without a last line that was cut off."""
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            token_ids, num_prompt_tokens = json.loads(line)
            yield Answer(token_ids, num_prompt_tokens)


def split_answers(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """To train on, and to score on."""
    parts: tuple[list[Answer], list[Answer]] = ([], [])
    for index, one in enumerate(answers):
        if len(one.token_ids) - one.num_prompt_tokens >= 2:
            parts[index % HELD_OUT == HELD_OUT - 1].append(one)
    return parts


def common_tokens(answers: Sequence[Answer], count: int, vocab_size: int) -> NDArray[np.int64]:
    """The most frequent ones; all, where there are no more than that."""
    if count >= vocab_size:
        return np.arange(vocab_size)
    seen = Counter(token for answer in answers for token in answer.token_ids)
    frequent = [token for token, _ in seen.most_common(count)]
    rest = (token for token in range(vocab_size) if token not in seen)
    return np.sort(np.array([*frequent, *(next(rest) for _ in range(count - len(frequent)))]))
