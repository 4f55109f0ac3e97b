"""A model that no process may hold, served by several that each have a limit of their own; and what
each of them reads of its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.faults.memory_group import MemoryGroup
from tests.fakes.process import environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

MIB = 1 << 20
LAYERS, HIDDEN, INNER, VOCABULARY = 16, 1024, 4096, 512
LIMIT = 256 * MIB  # of each process; the model is twice that

# Rank 0 is this process; each of the others enters the next group.
SERVE = """
import json, sys
from pathlib import Path
from benchmarks.faults.memory_group import MemoryGroup
from octavo_engine.config import EngineConfig
from octavo_engine.core.build import build_engine
from octavo_engine.executor import rank_processes
from tests.fakes.requests import make_prompt, make_request

settings, folders = json.loads(sys.argv[1]), sys.argv[2:]
spawn = rank_processes.spawn
rank_processes.spawn = lambda command, *more: spawn(
    MemoryGroup(Path(folders.pop(0))).command(command), *more
)
engine, _ = build_engine(EngineConfig(**settings))
engine.add(make_request([token % 500 for token in make_prompt(20)], max_tokens=8, logprobs=1))
answer = []
while engine.has_work:
    for output in engine.step().outputs:
        answer += [*output.token_ids, *output.logprobs]
engine.close()
print(json.dumps(answer, default=str))
"""
# What of a file a process has touched: its pages that are mapped here. The system reads ahead, and
# maps what it has in one piece as a whole, so that the file is forgotten first and read by pages.
LOAD = """
import mmap, os, sys, types
from octavo_engine.weights import mapped_file

def map_pages(*args, **options):
    mapped = mmap.mmap(*args, **options)
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped

mapped_file.mmap = types.SimpleNamespace(mmap=map_pages, ACCESS_READ=mmap.ACCESS_READ)

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.native.shard import RankPlace, Shard
from octavo_engine.backends.native.stages import StagePlace
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model

folder, way, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
files = resolve_model(folder)
checkpoint = open_checkpoint(files)
place = stage = None
if way == "tensor_parallel_size":
    place = RankPlace(Shard(rank, size), os.memfd_create("test"), 10.0)
elif way == "pipeline_parallel_size":
    stage = StagePlace(rank, size)
backend = NativeBackend(
    ModelConfig.from_hf(files.config), checkpoint, max_model_len=64, num_threads=1,
    quantization="none", place=place, stage=stage,
)
resident, is_model = 0, False
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        is_model = line.rstrip().endswith("model.safetensors")
    elif is_model and line.startswith("Rss:"):
        resident += int(line.split()[1]) << 10
print(resident)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 MiB in bf16, and none of it an embedding to speak of."""
    return write_model(tmp_path_factory.mktemp("large"), LAYERS)


def write_model(folder: Path, num_layers: int) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", num_layers)
    return folder


def write_tensors(path: Path, num_layers: int) -> None:
    """Random ones, of which no two matrices begin alike."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (HIDDEN,)
        for name in "qkvo":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    numbers = np.random.default_rng(5).standard_normal(INNER * HIDDEN + LAYERS, np.float32) / 32
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, shape in enumerate(shapes.values()):
            file.write(halves[number % LAYERS :][: int(np.prod(shape))].tobytes())


def serve(model: Path, limit: int | None, **sizes: int) -> subprocess.CompletedProcess[str]:
    """The answer of an engine whose processes have that limit each, as JSON."""
    settings: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "quantization": "none",
        "max_model_len": 64,
        "num_threads": max(sizes.values(), default=1),
        "kv_cache_memory_bytes": 16 * MIB,
        **sizes,
    }
    command = [sys.executable, "-c", SERVE, json.dumps(settings)]
    with ExitStack() as ends:
        if limit is not None:
            groups = []
            for rank in range(settings["num_threads"]):
                group = MemoryGroup.create(f"octavo-rank{rank}")
                if group is None:
                    pytest.skip("control groups cannot be made here")
                ends.callback(group.remove)
                group.limit(limit)
                groups.append(group)
            command = groups[0].command([*command, *(str(group.folder) for group in groups[1:])])
        return subprocess.run(
            command, capture_output=True, text=True, env=environment(), timeout=180, check=False
        )


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    return serve(model, None).stdout


def test_one_process_is_killed(model: Path) -> None:
    assert serve(model, LIMIT).returncode == -9


@pytest.mark.parametrize("way", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(("size", "limit"), [(2, 400 * MIB), (4, LIMIT)])
def test_several_processes_serve_it(
    model: Path, expected: str, way: str, size: int, limit: int
) -> None:
    done = serve(model, limit, **{way: size})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(expected)


def read_of(model: Path, way: str, rank: int, size: int) -> float:
    """The part of the model's file that a rank touches while it loads."""
    with (model / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model), way, str(rank), str(size)],
        capture_output=True, text=True, env=environment(), timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / (model / "model.safetensors").stat().st_size


def test_each_rank_reads_its_part_of_the_file(tmp_path: Path) -> None:
    small = write_model(tmp_path, 2)
    assert read_of(small, "one", 0, 1) > 0.99
    for way in ("tensor_parallel_size", "pipeline_parallel_size"):
        parts = [read_of(small, way, rank, 2) for rank in range(2)]
        assert max(parts) < 0.55
        assert 0.99 < sum(parts) < 1.05
