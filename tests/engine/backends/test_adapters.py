"""LoRA adapters: both backends against peft, and the bits of the native one against themselves."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from octavo_engine import _native
from octavo_engine.backends.adapters import AdapterLimits
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.adapter import read_adapter
from tests.engine.backends.driver import Driver, random_tokens
from tests.engine.backends.tolerance import (
    BF16_AGAINST_FLOAT32,
    FLOAT32,
    INTEGERS_AGAINST_FLOAT32,
    error,
)
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.adapters import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendStep, TakesAdapters
    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.config import Quantization

MAX_MODEL_LEN = 160
LIMITS = AdapterLimits(num_slots=4, max_rank=64)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


class AdaptedDriver(Driver):
    """Requests with adapters: by row, the slot."""

    slots: dict[int, int]

    def plan(self, work: Any, copies: Any = ()) -> BackendStep:
        step = super().plan(work, copies)
        slots = [self.slots.get(request.row, -1) for request, _ in work]
        step.adapters = np.array(slots, np.int32)
        return step


def native(
    model: TinyModel, dtype: Dtype = "f32", *, num_threads: int = 2, isa: str = "", **options: Any
) -> NativeBackend:
    return NativeBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=MAX_MODEL_LEN,
        dtype=dtype,
        num_threads=num_threads,
        isa=isa,
        **{"adapters": LIMITS} | options,
    )


def reference(model: TinyModel) -> TorchBackend:
    config = ModelConfig.from_hf(model.config)
    return TorchBackend(config, model.checkpoint(), max_model_len=MAX_MODEL_LEN, adapters=LIMITS)


def with_peft(model: TinyModel, folder: Path, *, seed: int = 0, **fields: Any) -> Any:
    """The model with an adapter of random weights, which is saved to the folder."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():  # peft asks transformers by a name that is to go
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)  # GPT-2: it sets it
        adapted = get_peft_model(copy.deepcopy(model.reference), LoraConfig(**fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                values = torch.randn(parameter.shape, generator=generator)
                size = 0.5 if ".lora_B" in name else 1.0
                parameter.copy_(size * parameter.shape[1] ** -0.5 * values)
    adapted.save_pretrained(str(folder))
    return adapted


def logits_of(adapted: Any, token_ids: list[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        output = adapted(input_ids=torch.tensor([token_ids]), use_cache=False)
    logits: NDArray[np.float32] = output.logits[0].float().numpy()
    return logits


def run(
    backend: NativeBackend | TorchBackend,
    folder: Path | None,
    token_ids: list[int],
    chunks: tuple[int, ...] = (50, 1, 1),
) -> NDArray[np.float32]:
    """The logits of one request with the adapter in slot 1."""
    driver = AdaptedDriver(backend)
    driver.slots = {}
    if folder is not None:
        place(backend, 1, folder)
        driver.slots = {0: 1}
    request = driver.add(0, token_ids)
    for count in (*chunks, len(token_ids) - sum(chunks)):
        driver.step([(request, count)])
    return np.array(request.logits)


def place(backend: TakesAdapters, slot: int, folder: Path) -> None:
    backend.set_adapter(slot, backend.pack_adapter(read_adapter(str(folder))))


FORMS: dict[str, dict[str, Any]] = {
    "q": {"r": 4, "target_modules": ["q_proj"]},
    "v": {"r": 4, "target_modules": ["v_proj"]},
    "q-v": {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]},
    "o": {"r": 3, "target_modules": ["o_proj"]},
    "up": {"r": 4, "target_modules": ["up_proj"]},
    "gate-down": {"r": 5, "target_modules": ["gate_proj", "down_proj"]},
    "all-1": {"r": 1, "lora_alpha": 2, "target_modules": ALL},
    "all-16": {"r": 16, "lora_alpha": 16, "target_modules": ALL},
    "all-64": {"r": 64, "lora_alpha": 16, "target_modules": ALL},
    "all-rslora": {"r": 7, "lora_alpha": 4, "use_rslora": True, "target_modules": ALL},
    "linear": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
    "one-layer": {"r": 4, "target_modules": ALL, "layers_to_transform": [1]},
    "patterns": {
        "r": 4, "target_modules": ALL, "rank_pattern": {"q_proj": 9, "down_proj": 2},
        "alpha_pattern": {"k_proj": 3.0},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_both_backends_equal_peft(form: str, tmp_path: Path) -> None:
    model, token_ids = tiny_model("llama"), random_tokens(90, seed=3)
    truth = logits_of(with_peft(model, tmp_path, **FORMS[form]), token_ids)
    assert error(truth, model.logits(token_ids)) > 0.01, "the adapter changes nothing"
    for backend in (reference(model), native(model)):
        np.testing.assert_allclose(run(backend, tmp_path, token_ids), truth, **FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2", ALL), ("qwen3", ALL), ("gemma2", ALL), ("gemma3", ALL), ("smollm3", ALL),
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]), ("granite", ALL),
        ("mixtral", ATTENTION), ("qwen2-moe", ATTENTION),
    ],
)  # fmt: skip
def test_families_equal_peft(family: str, targets: list[str], tmp_path: Path) -> None:
    model, token_ids = tiny_model(family), random_tokens(70, seed=4)
    truth = logits_of(with_peft(model, tmp_path, r=6, target_modules=targets), token_ids)
    for backend in (reference(model), native(model)):
        np.testing.assert_allclose(run(backend, tmp_path, token_ids), truth, **FLOAT32)


# One of each kind of names and of places of rows in a checkpoint (models/decoder_names.py).
ARRANGED = [
    "gpt2", "bigcode", "opt", "neox", "gptj", "falcon-new", "bloom", "mpt", "starcoder2", "phi",
    "stablelm", "cohere", "glm", "glm4-0414", "ernie", "hunyuan", "lfm2", "granite4",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ARRANGED)
def test_layers_that_lie_otherwise_in_checkpoints(family: str, tmp_path: Path) -> None:
    model, token_ids = tiny_model(family), random_tokens(70, seed=4)
    truth = logits_of(with_peft(model, tmp_path, r=6, target_modules="all-linear"), token_ids)
    assert error(truth, model.logits(token_ids)) > 0.1, "the adapter changes nothing"
    for backend in (reference(model), native(model)):
        np.testing.assert_allclose(run(backend, tmp_path, token_ids), truth, **FLOAT32)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("nemotron-h", ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "in_proj"]),
        ("qwen3-next", ["q_proj", "k_proj", "o_proj", "in_proj_qkvz", "in_proj_ba"]),
        ("dbrx", ["Wqkv", "out_proj"]),
    ],
)
def test_some_layers_that_lie_otherwise(family: str, targets: list[str], tmp_path: Path) -> None:
    model, token_ids = tiny_model(family), random_tokens(70, seed=4)
    truth = logits_of(with_peft(model, tmp_path, r=6, target_modules=targets), token_ids)
    assert error(truth, model.logits(token_ids)) > 0.1, "the adapter changes nothing"
    for backend in (reference(model), native(model)):
        np.testing.assert_allclose(run(backend, tmp_path, token_ids), truth, **FLOAT32)


def test_an_adapter_of_another_model_is_refused_under_its_own_names(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    with_peft(model, tmp_path, r=4, target_modules=["c_fc"])
    backend = native(tiny_model("lfm2"))
    with pytest.raises(ModelError, match=r"no linear layer transformer\.h\.0\.mlp\.c_fc; its"):
        backend.pack_adapter(read_adapter(str(tmp_path)))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_integers_get_what_their_dequantised_model_gets(
    dtype: Dtype, quantization: Quantization, tmp_path: Path
) -> None:
    model, token_ids = tiny_model("llama"), random_tokens(90, seed=5)
    with_peft(model, tmp_path, r=8, target_modules=ALL)
    backend = native(model, dtype, quantization=quantization)
    truth = native(dequantised(model, quantization), "f32")
    assert error(run(backend, tmp_path, token_ids), run(truth, tmp_path, token_ids)) < (
        INTEGERS_AGAINST_FLOAT32 if dtype == "f32" else BF16_AGAINST_FLOAT32
    )


def dequantised(model: TinyModel, quantization: Quantization) -> TinyModel:
    """The model with its linear layers' weights as integers of that kind stand for them."""
    team = _native.Team(1)
    tensors = {}
    for name, tensor in model.tensors.items():
        kind = (
            "q8" if quantization == "int8" or name.startswith(("lm_head", "model.embed")) else "q4"
        )
        if tensor.ndim == 2:
            packed = _native.Packed(tensor.shape[0], tensor.shape[1], kind)
            data = tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1)
            packed.pack(team, 0, data, "F32", tensor.shape[0])
            tensor = torch.from_numpy(packed.unpack())
        tensors[name] = tensor
    return dataclasses.replace(model, tensors=tensors)


def test_bf16_is_near_float32(tmp_path: Path) -> None:
    model, token_ids = tiny_model("llama"), random_tokens(90, seed=6)
    with_peft(model, tmp_path, r=8, target_modules=ALL)
    truth = run(native(model), tmp_path, token_ids)
    assert error(run(native(model, "bf16"), tmp_path, token_ids), truth) < BF16_AGAINST_FLOAT32


# What the bits of an answer may not depend on.

NUMBERS: list[tuple[Dtype, Quantization]] = [("f32", "none"), ("bf16", "none"), ("f32", "int8"),
                                             ("bf16", "int4")]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of three ranks for other layers each; none of them has all of a fused layer."""
    model = tiny_model("llama")
    made = []
    for seed, (rank, targets) in enumerate(
        [(4, ["q_proj", "v_proj", "up_proj", "o_proj"]), (33, ALL), (7, ["k_proj", "down_proj"])]
    ):
        folder = tmp_path_factory.mktemp(f"adapter-{seed}")
        with_peft(model, folder, seed=seed, r=rank, target_modules=targets)
        made.append(folder)
    return made


def mixed(backend: NativeBackend, folders: list[Path]) -> AdaptedDriver:
    """Row r has adapter r % 4, and every fourth row none."""
    driver = AdaptedDriver(backend)
    for slot, folder in enumerate(folders):
        place(backend, slot, folder)
    driver.slots = {row: row % 4 if row % 4 < 3 else -1 for row in range(8)}
    return driver


@pytest.mark.parametrize(("dtype", "quantization"), NUMBERS)
def test_a_mixed_batch_has_the_bits_of_each_alone(
    dtype: Dtype, quantization: Quantization, folders: list[Path]
) -> None:
    model = tiny_model("llama")
    prompts = [random_tokens(n, seed=n) for n in (40, 33, 61, 50, 3, 21, 70, 12)]
    backend = native(model, dtype, quantization=quantization)
    driver = mixed(backend, folders)
    requests = [driver.add(row, prompt) for row, prompt in enumerate(prompts)]
    driver.step([(r, len(r.token_ids) - 2) for r in requests])
    driver.step([(r, 1) for r in requests])
    driver.step([(r, 1) for r in reversed(requests)])
    plain = native(model, dtype, quantization=quantization, adapters=None)
    for row, request in enumerate(requests):
        slot = driver.slots[row]
        alone = run(backend, None if slot < 0 else folders[slot], prompts[row], chunks=())
        np.testing.assert_array_equal(np.array(request.logits), alone)
        if slot < 0:
            np.testing.assert_array_equal(alone, run(plain, None, prompts[row], chunks=()))


@pytest.mark.parametrize(("dtype", "quantization"), NUMBERS)
@pytest.mark.parametrize(
    "other", [{"num_threads": 1}, {"num_threads": 3}, {"is_fused": False}, {"chunks": (1, 1, 5)}]
)
def test_bits_do_not_depend_on_threads_fusion_or_chunks(
    other: dict[str, Any], dtype: Dtype, quantization: Quantization, folders: list[Path]
) -> None:
    model, prompt = tiny_model("llama"), random_tokens(120, seed=8)
    chunks = other.get("chunks", ())
    options = {name: value for name, value in other.items() if name != "chunks"}
    for folder in folders:
        plain = run(native(model, dtype, quantization=quantization), folder, prompt, chunks=())
        backend = native(model, dtype, quantization=quantization, **options)
        np.testing.assert_array_equal(run(backend, folder, prompt, chunks=chunks), plain)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_all_instruction_sets_agree_on_floats(
    quantization: Quantization, folders: list[Path]
) -> None:
    model, prompt = tiny_model("llama"), random_tokens(60, seed=9)
    made = [
        run(native(model, "f32", isa=isa, quantization=quantization), folders[1], prompt)
        for isa in _native.available_isas()
    ]
    for other in made[1:]:
        np.testing.assert_array_equal(other, made[0])


def test_an_emptied_slot_is_refused(folders: list[Path]) -> None:
    backend = native(tiny_model("llama"))
    driver = mixed(backend, folders)
    backend.set_adapter(0, None)
    request = driver.add(0, random_tokens(8))
    with pytest.raises(ValueError, match="slot 0, which is empty"):
        driver.step([(request, 8)])


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"model.layers.0.mlp.experts.0.gate_proj": (64, 48)}, "is an expert"),
        ({"lm_head": (64, 256)}, "the embedding or the head"),
        ({"model.layers.7.self_attn.q_proj": (64, 64)}, "no linear layer model.layers.7"),
        ({"model.layers.0.self_attn.q_proj": (32, 64)}, r"takes \[4, 64\] and \[64, 4\]"),
    ],
)
def test_adapters_of_other_models_are_refused_by_name(
    modules: dict[str, tuple[int, int]], message: str, tmp_path: Path
) -> None:
    files = read_adapter(str(write_adapter(tmp_path, modules)))
    for backend in (reference(tiny_model("llama")), native(tiny_model("llama"))):
        with pytest.raises(ModelError, match=message):
            backend.pack_adapter(files)


def stored_as(folder: Path, rounded: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """The adapter with its numbers in `dtype`, and with the same numbers in float32."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "adapter_model.safetensors")
    for name, kept in (("stored", dtype), ("float32", torch.float32)):
        (rounded / name).mkdir(parents=True)
        numbers = {key: one.to(dtype).to(kept) for key, one in tensors.items()}
        save_file(numbers, rounded / name / "adapter_model.safetensors")
        config = (folder / "adapter_config.json").read_text()
        (rounded / name / "adapter_config.json").write_text(config)
    return rounded / "stored", rounded / "float32"


@pytest.mark.parametrize("computed", ["f32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_file_of_16_bits_is_packed_as_its_numbers_in_float32_are(
    dtype: torch.dtype, computed: Dtype, tmp_path: Path
) -> None:
    """To the bit, with an odd rank too, whose last pair is filled up."""
    model = tiny_model("llama")
    names = [f"model.layers.{i}.{part}" for i in range(2) for part in
             ("self_attn.q_proj", "mlp.up_proj")]  # fmt: skip
    shapes = {name: model.reference.state_dict()[f"{name}.weight"].shape for name in names}
    modules = {name: (shape[1], shape[0]) for name, shape in shapes.items()}
    written = write_adapter(tmp_path / "written", modules, rank=5)
    stored, same = stored_as(written, tmp_path / "rounded", dtype)
    token_ids = random_tokens(60)
    found = run(native(model, computed), stored, token_ids)
    assert np.array_equal(found, run(native(model, computed), same, token_ids))
    assert not np.array_equal(found, run(native(model, computed), None, token_ids))
    if computed == "f32":
        np.testing.assert_allclose(found, run(reference(model), stored, token_ids), **FLOAT32)


def test_memory_of_an_adapter_that_went_leaves_nothing_in_the_next(tmp_path: Path) -> None:
    """The second one has fewer ranks and layers: what it does not fill must be zero."""
    model = tiny_model("llama")
    parts = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
    names = [f"model.layers.{layer}.{part}" for layer in range(2) for part in parts]
    shapes = {name: model.reference.state_dict()[f"{name}.weight"].shape for name in names}
    modules = {name: (shape[1], shape[0]) for name, shape in shapes.items()}
    large = write_adapter(tmp_path / "large", modules, rank=18, size=float("inf"))
    some = {name: modules[name] for name in names if "down" not in name}
    small = write_adapter(tmp_path / "small", some, rank=17, seed=1)
    token_ids = random_tokens(60)
    expected = run(native(model), small, token_ids)
    backend = native(model)
    place(backend, 1, large)
    num_bytes = backend.pack_adapter(read_adapter(str(large))).nbytes
    assert backend._adapters is not None
    assert backend._adapters.spare_bytes == num_bytes  # of the one that nothing holds
    backend.set_adapter(1, None)
    packed = backend.pack_adapter(read_adapter(str(small)))
    assert num_bytes / 2 <= packed.nbytes <= num_bytes
    del packed
    assert np.array_equal(run(backend, small, token_ids), expected)


def test_memory_for_the_next_adapter_is_made_ready_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (64, 64)})
    backend = native(model)
    assert backend._adapters is not None
    backend.prepare_adapter()  # before any: of no size
    assert backend._adapters.spare_bytes == 0
    held = [backend.pack_adapter(read_adapter(str(folder)))]
    backend.prepare_adapter()
    assert backend._adapters.spare_bytes == held[0].nbytes
    held.append(backend.pack_adapter(read_adapter(str(folder))))
    assert backend._adapters.spare_bytes == 0  # it has it
    held.clear()
    assert backend._adapters.spare_bytes > 0
