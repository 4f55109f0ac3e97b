"""How long a grammar's mask takes over a real vocabulary, and how long schemas take to compile.

    python benchmarks/grammar.py [--model demo://smollm2] [--texts 20]

Each schema is walked along texts of its language, chosen token by token at random among the allowed
ones, and every mask on the way is timed as the engine makes it.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import numpy as np

from octavo_engine.config import EngineConfig
from octavo_engine.core.model_files import load_model_tokenizer, resolve
from octavo_engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from octavo_engine.grammar.masks import MaskWorkers
from octavo_engine.grammar.normal import (
    choice_spec,
    json_object_spec,
    json_schema_spec,
    regex_spec,
    structural_tag_spec,
)
from octavo_engine.grammar.run import GrammarRun
from octavo_engine.grammar.vocabulary import Vocabulary

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["name", "age"],
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{6}$"},
        "status": {"enum": ["open", "paid", "sent", "returned"]},
        "total": {"type": "number", "minimum": 0},
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["sku", "count"],
            },
        },
        "at": {"type": "string", "format": "date-time"},
    },
    "required": ["id", "status", "lines"],
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}
SPECS = {
    "person": json_schema_spec(PERSON, strict=True),
    "person, open": json_schema_spec(PERSON),
    "order": json_schema_spec(ORDER, strict=True),
    "tree": json_schema_spec(TREE, strict=True),
    "any object": json_object_spec(),
    "40 fields": json_schema_spec(
        {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(40)}},
        strict=True,
    ),
    "sentiment": choice_spec(["positive", "negative", "neutral"]),
    "phone": regex_spec(r"\+?[0-9]{1,3}( [0-9]{2,4}){2,3}"),
    "tool call": structural_tag_spec(
        {
            "type": "structural_tag",
            "structures": [
                {"begin": "<function=order>", "schema": ORDER, "end": "</function>"},
                {"begin": "<function=person>", "schema": PERSON, "end": "</function>"},
            ],
            "triggers": ["<function="],
        }
    ),
}


def walk(compiled: CompiledGrammar, rng: random.Random, max_tokens: int) -> list[float]:
    """Microseconds of each mask along one random text."""
    run = GrammarRun(
        compiled.matcher.deep_copy(), compiled.vocabulary, MaskWorkers(), is_jumping=False
    )
    times = []
    for _ in range(max_tokens):
        run.is_slow = False  # nobody waits here: no thread is to begin by itself
        start = time.perf_counter()
        run.prepare()
        times.append((time.perf_counter() - start) * 1e6)
        assert run.mask is not None
        run.is_slow = False
        ids = np.flatnonzero(np.unpackbits(run.mask.view(np.uint8), bitorder="little"))
        ids = ids[~np.isin(ids, compiled.vocabulary.eos_token_ids)]
        if not len(ids):
            break
        run.accept(int(rng.choice(ids.tolist())))
        if run.is_complete or run.error is not None:
            break
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--texts", type=int, default=20, help="walks of each grammar")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a walk, at most")
    args = parser.parse_args()
    config = EngineConfig(model=args.model)
    tokenizer = load_model_tokenizer(config, resolve(config))
    start = time.perf_counter()
    vocabulary = Vocabulary(tokenizer, vocab_size=tokenizer.vocab_size)
    seconds = time.perf_counter() - start
    print(f"vocabulary of {tokenizer.vocab_size:,} tokens: {seconds:.2f} s, once a model")
    compiler = GrammarCompiler(lambda: vocabulary)
    print(f"{'grammar':<14}{'compile ms':>11}{'masks':>7}{'p50 us':>8}{'p99 us':>8}{'max us':>8}")
    everything: list[float] = []
    for name, spec in SPECS.items():
        compilation = compiler.compile(spec)
        while not compilation.is_done:
            time.sleep(0.0005)
            compiler.settle()
        if compilation.compiled is None or compilation.begun_at is None:
            raise SystemExit(f"{name}: {compilation.error}")
        rng = random.Random(1)
        times = [t for _ in range(args.texts) for t in walk(compilation.compiled, rng, args.tokens)]
        _print(name, (compilation.ended_at - compilation.begun_at) * 1e3, times)
        everything += times
    _print("all", None, everything)


def _print(name: str, compile_ms: float | None, times: list[float]) -> None:
    compiled = "" if compile_ms is None else f"{compile_ms:.1f}"
    p50, p99 = np.percentile(times, [50, 99])
    print(f"{name:<14}{compiled:>11}{len(times):>7}{p50:>8.0f}{p99:>8.0f}{max(times):>8.0f}")


if __name__ == "__main__":
    main()
