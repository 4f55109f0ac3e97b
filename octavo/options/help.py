"""What `--help` shows of each command: two examples, and the options that most people need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """`common` empty: the command has few options, and all are shown."""

    examples: tuple[str, ...]
    common: frozenset[str] = frozenset()  # flags without dashes in front


_ENGINE = ("model", "device", "quantization", "max-model-len", "kv-cache-memory-bytes",
           "num-threads", "config")  # fmt: skip
_TERMINAL = ("prompt", "url", "api-key", "max-tokens", "temperature", "top-p", "model", "device",
             "quantization", "max-model-len", "seed")  # fmt: skip

HELP: Mapping[str, CommandHelp] = {
    "run": CommandHelp(
        ("octavo run smollm2", "octavo run qwen3:0.6b 'What is the capital of France?'"),
        frozenset((*_TERMINAL, "system")) - {"url", "api-key"},
    ),
    "list": CommandHelp(("octavo list", "octavo list --all")),
    "pull": CommandHelp(("octavo pull smollm2", "octavo pull Qwen/Qwen2.5-0.5B-Instruct")),
    "rm": CommandHelp(("octavo rm smollm2", "octavo rm qwen3:0.6b qwen3:4b")),
    "ps": CommandHelp(("octavo ps", "octavo ps --json")),
    "show": CommandHelp(("octavo show smollm2", "octavo show qwen3:0.6b --json")),
    "serve": CommandHelp(
        (
            "octavo serve demo://smollm2",
            "octavo serve Qwen/Qwen2.5-0.5B-Instruct --host 0.0.0.0 --max-model-len 8192",
        ),
        frozenset(
            (*_ENGINE, "served-model-name", "memory-fraction", "kv-cache-dtype", "chat-template",
             "max-num-seqs", "host", "port", "api-key", "tool-call-parser",
             "files-dir", "log-level", "print-config")
        ),
    ),
    "router": CommandHelp(
        (
            "octavo router --upstreams http://localhost:8000,http://localhost:8001",
            "octavo router --host 0.0.0.0 --kubernetes --namespace models",
        ),
        frozenset(
            ("config", "host", "port", "upstreams", "upstreams-file", "kubernetes", "namespace",
             "policy", "api-key", "keys-file", "workers", "tls-cert", "tls-key", "max-queue",
             "queue-timeout", "drain-timeout", "log-level", "print-config")
        ),
    ),
    "up": CommandHelp(
        ("octavo up demo://smollm2 --replicas 2", "octavo up --file llmdeployment.yaml")
    ),
    "status": CommandHelp(("octavo status", "octavo status --wait 100 --json")),
    "down": CommandHelp(("octavo down", "octavo down --now")),
    "chat": CommandHelp(
        (
            "octavo chat demo://smollm2",
            "octavo chat --url http://localhost:8000 --system 'Answer in one sentence.'",
        ),
        frozenset((*_TERMINAL, "system")),
    ),
    "complete": CommandHelp(
        (
            "octavo complete demo://smollm2 --prompt 'The capital of France is' --max-tokens 8",
            "octavo complete --url http://localhost:8000",
        ),
        frozenset(_TERMINAL),
    ),
    "transcribe": CommandHelp(
        (
            "octavo transcribe meeting.mp3",
            "octavo transcribe talk.wav --format srt --language en",
        ),
        frozenset(("url", "api-key", "model", "language", "prompt", "format", "translate")),
    ),
    "run-batch": CommandHelp(
        (
            "octavo run-batch -i requests.jsonl -o answers.jsonl --model demo://smollm2",
            "octavo run-batch -i requests.jsonl -o answers.jsonl --model demo://smollm2 --resume",
        ),
        frozenset((*_ENGINE, "input-file", "output-file", "concurrency", "resume", "overwrite")),
    ),
    "bench": CommandHelp(
        (
            "octavo bench throughput --model demo://smollm2",
            "octavo bench serve --base-url http://localhost:8000 --max-concurrency 8",
        )
    ),
    "bench throughput": CommandHelp(
        (
            "octavo bench throughput --model demo://smollm2",
            "octavo bench throughput --model demo://smollm2 --input-len 1024 --output-len 16",
        ),
        frozenset(
            (*_ENGINE, "input-len", "output-len", "num-prompts", "json", "profile", "max-num-seqs")
        ),
    ),
    "bench latency": CommandHelp(
        (
            "octavo bench latency --model demo://smollm2",
            "octavo bench latency --model demo://smollm2 --batch-size 8 --num-iters 3",
        ),
        frozenset(
            (*_ENGINE, "input-len", "output-len", "batch-size", "num-iters", "num-iters-warmup",
             "json", "profile")
        ),
    ),
    "bench serve": CommandHelp(
        (
            "octavo bench serve --base-url http://localhost:8000",
            "octavo bench serve --base-url http://localhost:8000 --request-rate 4 --json -",
        )
    ),
    "bench steps": CommandHelp(
        (
            "octavo bench steps --model demo://smollm2",
            "octavo bench steps --shape 1.5b --plot roofline.png",
        ),
        frozenset(
            (*_ENGINE, "shape", "batch-sizes", "context-len", "input-len", "long-context-len",
             "num-iters", "json", "plot")
        ),
    ),
    "bench router": CommandHelp(
        ("octavo bench router", "octavo bench router --engines 8 --load 0.9 --json -")
    ),
    "operator": CommandHelp(
        (
            "octavo operator --namespaces models",
            "octavo operator --kubeconfig ~/.kube/config --log-format text",
        ),
        frozenset(
            ("namespaces", "kubeconfig", "context", "cpu-image", "cuda-image", "router-service",
             "router-url", "leader-election", "host", "port", "log-format", "log-level")
        ),
    ),
    "quantize": CommandHelp(
        (
            "octavo quantize Qwen/Qwen2.5-0.5B-Instruct --to int4 --output qwen-int4",
            "octavo quantize ./my-model --to int8 --output my-model-int8",
        )
    ),
    "bundle": CommandHelp(
        (
            "octavo bundle create --release build/release --model smollm2",
            "octavo bundle load octavo-0.1.0.bundle --registry registry.local:5000",
        )
    ),
    "fetch": CommandHelp(
        (
            "octavo fetch demo://smollm2",
            "octavo fetch hf://Qwen/Qwen2.5-0.5B-Instruct --to ./qwen",
        )
    ),
    "doctor": CommandHelp(("octavo doctor", "octavo doctor --json")),
}  # fmt: skip
