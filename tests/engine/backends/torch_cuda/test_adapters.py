"""LoRA adapters on a device: whole models against peft and the reference, bits, graphs, engines."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.adapters import AdapterLimits
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.grammar.normal import regex_spec
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.state.adapter import AdapterRef
from octavo_engine.weights.adapter import read_adapter
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.test_adapters import (
    ALL,
    ATTENTION,
    FORMS,
    AdaptedDriver,
    logits_of,
    with_peft,
)
from tests.engine.backends.tolerance import BF16_AGAINST_FLOAT32, FLOAT32, error
from tests.engine.backends.torch_cuda import test_compiling
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.recorders import RunAgain
from tests.engine.backends.torch_cuda.steps import make_sampling
from tests.engine.backends.torch_cuda.test_packed_models import Quantized
from tests.engine.backends.torch_cuda.test_pretended import write as write_model
from tests.engine.backends.torch_cuda.variants import Variants
from tests.engine.models.tiny import tiny_model
from tests.fakes.adapters import write_adapter
from tests.fakes.requests import make_request

pytestmark = pytest.mark.slow
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")

LIMITS = AdapterLimits(num_slots=4, max_rank=64)
# Of the tiny llama: another inner size than hidden size, and fewer keys than queries.
SHAPES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 32), "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (64, 96), "mlp.up_proj": (64, 96),
    "mlp.down_proj": (96, 64),
}  # fmt: skip


def build(name, device, *, dtype=torch.float32, kernels="plain", checkpoint=None, **options):
    model = tiny_model(name)
    return open_cuda(
        ModelConfig.from_hf(model.config), checkpoint or model.checkpoint(), max_model_len=512,
        dtype=dtype, device=device.type, kernels=kernels, **{"adapters": LIMITS} | options,
    )  # fmt: skip


def reference(name):
    model = tiny_model(name)
    config = ModelConfig.from_hf(model.config)
    return TorchBackend(config, model.checkpoint(), max_model_len=512, adapters=LIMITS)


def place(backend, slot, folder):
    backend.set_adapter(slot, backend.pack_adapter(read_adapter(str(folder))))


def run(backend, folder, token_ids, chunks=(), slot=1):
    """The logits of one request with the adapter."""
    driver = AdaptedDriver(backend)
    driver.slots = {}
    if folder is not None:
        place(backend, slot, folder)
        driver.slots = {0: slot}
    request = driver.add(0, token_ids)
    for count in (*chunks, len(token_ids) - sum(chunks)):
        driver.step([(request, count)])
    return np.array(request.logits)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Adapters of three ranks for other layers each; none but the second has all of a layer."""
    made = []
    for seed, (rank, modules) in enumerate(
        [(4, ["q_proj", "v_proj", "up_proj", "o_proj"]), (33, ALL), (7, ["k_proj", "down_proj"])]
    ):
        layers = {
            f"model.layers.{layer}.{name}": shape
            for layer in range(2)
            for name, shape in SHAPES.items()
            if name.rpartition(".")[2] in modules
        }
        folder = tmp_path_factory.mktemp(f"adapter-{seed}")
        made.append(write_adapter(folder, layers, rank=rank, seed=seed, size=0.1))
    return made


# ── against peft, and the reference that is tested against it ──


@pytest.mark.parametrize("form", ["q-v", "gate-down", "all-1", "all-64", "all-rslora", "patterns"])
def test_forms_equal_peft(form, device, tmp_path):
    pytest.importorskip("peft")
    model, token_ids = tiny_model("llama"), random_tokens(60, seed=3)
    truth = logits_of(with_peft(model, tmp_path, **FORMS[form]), token_ids)
    assert error(truth, model.logits(token_ids)) > 0.01, "the adapter changes nothing"
    found = run(build("llama", device), tmp_path, token_ids, (50, 1))
    np.testing.assert_allclose(found, truth, **FLOAT32)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", "all-linear"), ("neox", "all-linear"), ("phi3", "all-linear"), ("gemma2", ALL),
        ("qwen3", ALL), ("qwen2-moe", ATTENTION),
    ],
)  # fmt: skip
def test_families_equal_peft(family, targets, device, tmp_path):
    pytest.importorskip("peft")
    model, token_ids = tiny_model(family), random_tokens(50, seed=4)
    truth = logits_of(with_peft(model, tmp_path, r=6, target_modules=targets), token_ids)
    found = run(build(family, device), tmp_path, token_ids, (30, 1))
    np.testing.assert_allclose(found, truth, **FLOAT32)


@pytest.mark.parametrize("number", range(3))
def test_triton_kernels_equal_the_reference(number, device, folders):
    token_ids = random_tokens(19, seed=1)
    truth = run(reference("llama"), folders[number], token_ids)
    assert error(truth, tiny_model("llama").logits(token_ids)) > 0.01
    found = run(build("llama", device, kernels="triton"), folders[number], token_ids, (16, 1))
    np.testing.assert_allclose(found, truth, **FLOAT32)


@pytest.mark.parametrize("kernels", ["plain", pytest.param("triton", marks=pytest.mark.gpu)])
def test_bf16_is_as_near_as_bf16_can_be(kernels, device, folders):
    token_ids = random_tokens(80, seed=6)
    backend = build("llama", device, dtype=torch.bfloat16, kernels=kernels)
    truth = run(reference("llama"), folders[1], token_ids)
    assert error(run(backend, folders[1], token_ids), truth) < BF16_AGAINST_FLOAT32


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("sorts", [(), ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")])
def test_quantised_bases_and_columns_in_another_order(sorts, kernels, device, folders):
    """The adapter sees columns in the model's order, the base in its own."""
    token_ids = random_tokens(14, seed=5)
    backend = build(
        "llama", device, kernels=kernels, checkpoint=Quantized("int4", sorts=sorts, model="llama")
    )
    layer = backend._model.body.layers[0].attention.qkv
    assert (layer.weight.order is not None) == bool(sorts)
    expanded = build(
        "llama", device, keep_quantized=False,
        checkpoint=Quantized("int4", sorts=sorts, model="llama"),
    )  # fmt: skip
    for folder in folders:
        truth = run(expanded, folder, token_ids)
        found = run(backend, folder, token_ids, (12,))
        np.testing.assert_allclose(found, truth, **FLOAT32)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bases_that_round_their_inputs(kind, device, folders):
    token_ids = random_tokens(50, seed=5)
    options: dict[str, Any] = {"checkpoint": Quantized(kind, model="llama")}
    backend = build("llama", device, dtype=torch.bfloat16, **options)
    truth = run(build("llama", device, **options), folders[1], token_ids)
    assert error(run(backend, folders[1], token_ids), truth) < {"int8": 0.06, "fp8": 0.15}[kind]


def test_adapters_of_other_models_are_refused_by_name(device, tmp_path):
    for modules, message in (
        ({"lm_head": (64, 256)}, "the embedding or the head"),
        ({"model.layers.7.self_attn.q_proj": (64, 64)}, "no linear layer model.layers.7"),
        ({"model.layers.0.self_attn.q_proj": (32, 64)}, r"takes \[4, 64\] and \[64, 4\]"),
    ):
        files = read_adapter(str(write_adapter(tmp_path, modules)))
        with pytest.raises(ModelError, match=message):
            build("llama", device).pack_adapter(files)


# ── bits, and company ──

PROMPTS = [random_tokens(n, seed=n) for n in (12, 3, 17, 9, 5)]
SLOTS = {0: 0, 1: 1, 2: -1, 3: 2, 4: 1}


def together(backend, folders, *, slots=None):
    """Prompts in parts, then single tokens, in several orders."""
    driver = AdaptedDriver(backend)
    for slot, folder in enumerate(folders):
        place(backend, slot, folder)
    driver.slots = SLOTS if slots is None else slots
    requests = [driver.add(row, prompt) for row, prompt in enumerate(PROMPTS)]
    driver.step([(r, len(r.token_ids) - 2) for r in requests])
    driver.step([(r, 1) for r in requests])
    driver.step([(r, 1) for r in reversed(requests)])
    return [np.array(request.logits) for request in requests]


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_a_mixed_batch_is_close_to_each_alone(kernels, device, folders):
    found = together(build("llama", device, kernels=kernels), folders)
    for row, logits in enumerate(found):
        folder = None if SLOTS[row] < 0 else folders[SLOTS[row]]
        alone = run(reference("llama"), folder, PROMPTS[row])
        np.testing.assert_allclose(logits, alone, **FLOAT32)


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_batch_invariant_bits_are_those_of_each_alone(dtype, device, folders):
    backend = build("llama", device, dtype=dtype, kernels="triton", batch_invariant=True)
    found = together(backend, folders)
    for row, logits in enumerate(found):
        folder = None if SLOTS[row] < 0 else folders[SLOTS[row]]
        alone = run(backend, folder, PROMPTS[row], (2,), slot=3)
        assert np.array_equal(logits, alone)


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_rows_without_an_adapter_have_the_bits_of_a_step_without_adapters(kernels, device, folders):
    """In the same company, so that libraries choose the same products."""
    backend = build("llama", device, kernels=kernels)
    mixed = together(backend, folders)
    plain = together(build("llama", device, kernels=kernels, adapters=None), [], slots={})
    assert np.array_equal(mixed[2], plain[2])
    assert not any(np.array_equal(mixed[row], plain[row]) for row in (0, 1, 3, 4))


# ── graphs ──


def test_steps_with_and_without_adapters_have_graphs_of_their_own(device, folders):
    backend = build("llama", device, kernels="triton")
    backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = AdaptedDriver(backend)
    for slot, folder in enumerate(folders):
        place(backend, slot, folder)
    driver.slots = {0: 1, 1: -1, 2: 0}
    requests = [driver.add(row, random_tokens(14 + row, seed=row)) for row in range(3)]
    driver.step([(request, 3 + row) for row, request in enumerate(requests)])
    for number in range(4):  # other rows each time, and once other adapters in the same graph
        driver.slots = {0: 1, 1: -1, 2: 0}
        driver.step([(request, 1) for request in requests[number % 3 :] + requests[: number % 3]])
    for _ in range(3):  # a step of the one without an adapter only
        driver.step([(requests[1], 1)])
    captured = backend._graphs.captured
    assert {1} < captured and len(captured) == 2
    (adapted,) = captured - {1}
    assert adapted[0] is True and adapted[1].seqs == 4 and adapted[1].adapter_tiles == 4
    assert backend._recorder.num_replays == 5
    for row, request in enumerate(requests):
        slot = driver.slots[row]
        folder = None if slot < 0 else folders[slot]
        seen = request.token_ids[: request.num_computed]
        truth = run(reference("llama"), folder, seen)
        np.testing.assert_allclose(np.array(request.logits), truth, **FLOAT32)


def test_another_adapter_in_a_slot_needs_no_other_graph(device, folders):
    backend = build("llama", device, kernels="triton", adapters=AdapterLimits(1, 40))
    backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = AdaptedDriver(backend)
    driver.slots = {0: 0, 1: 0}
    done = []
    for row, folder in enumerate(folders[:2]):
        place(backend, 0, folder)
        request = driver.add(row, random_tokens(9, seed=row))
        driver.step([(request, 5)])
        for _ in range(4):
            driver.step([(request, 1)])
        done.append((request, folder))
    assert len(backend._graphs.captured) == 1 and backend._recorder.num_replays == 7
    for request, folder in done:
        truth = run(reference("llama"), folder, request.token_ids)
        np.testing.assert_allclose(np.array(request.logits), truth, **FLOAT32)


@test_compiling.needs_interpreter
@pytest.mark.parametrize("options", [{"use_graphs": True}, {"batch_invariant": True}])
def test_traffic_compiles_nothing_that_the_warm_up_did_not(options, device, monkeypatch, folders):
    from octavo_engine.backends.torch import adapter_tiles, compiling

    for module in (adapter_tiles, compiling):  # so that small steps have both cuts
        monkeypatch.setattr(module, "FEW_TOKENS", 24)
    variants = Variants(monkeypatch, runs=False)
    driver = test_compiling.warmed("llama", device, variants, adapters=LIMITS, **options)
    known = variants.take()
    place(driver.backend, 2, folders[1])
    requests = [driver.add(row, random_tokens(90, seed=row)) for row in range(18)]
    for counts in ([2, 5, 1], [1] * 3, [1] * 3, [1], [1] * 18, [30, 1, 9]):
        step = driver.plan([(requests[row], n) for row, n in enumerate(counts)])
        step = dataclasses.replace(
            step, logit_rows=(step.seq_starts[1:] - 1).astype(np.int32),
            adapters=np.array([2 - 3 * (row % 2) for row in range(len(counts))], np.int32),
        )  # fmt: skip
        driver.backend.launch(step, make_sampling(len(counts))).wait()
    assert variants.take() <= known


# ── whole engines ──

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.0, "grammar": regex_spec("(ab|ba)+")},
    {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.0, "repetition_penalty": 1.3},
]  # fmt: skip
NGRAMS = '{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


def make_engine(backend, **settings):
    config = EngineConfig(
        device="sim", enable_lora=True, max_loras=2, max_cpu_loras=3, max_model_len=160,
        sim=SimConfig(vocab_size=320, kv_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48), **settings,
    )  # fmt: skip
    return build_engine(config, backend=backend)[0]


def requests_of(folders, count):
    """With three adapters and without one, over two slots; prompts begin alike."""
    refs = [None, *(AdapterRef(f.name, str(f), read_adapter(str(f)).digest) for f in folders)]
    shared = random_tokens(40, seed=9)
    return [
        make_request(
            shared[: 7 + 9 * (n % 3)] + [n] * 3, request_id=str(n), max_tokens=4 + n % 5, seed=n,
            ignore_eos=True, adapter=refs[n % 4], **PARAMS[n % len(PARAMS)],
        )
        for n in range(count)
    ]  # fmt: skip


def said(engine, requests, *, folders=()):
    """Their tokens. Meanwhile `folders` are loaded, and forgotten, again and again."""
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    num_steps = 0
    while engine.has_work:
        if folders and num_steps < 30:
            folder = folders[num_steps % len(folders)]
            engine.load_adapter(f"load-{num_steps}", str(folder))
            engine.unload_adapter(read_adapter(str(folder)).digest)
        num_steps += 1
        for output in engine.step().outputs:
            assert output.finish_reason not in ("error", "refused"), output
            if output.request_id in tokens:
                tokens[output.request_id] += output.token_ids
        engine.scheduler.check_invariants()
    return tokens


def vocabulary_backend(device, **options):
    model = tiny_model("llama", vocab_size=320)
    return open_cuda(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=160,
        dtype=torch.float32, device=device.type, adapters=AdapterLimits(2, 64),
        **{"kernels": "plain"} | options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{"async_scheduling": True}, {"async_scheduling": False}, {"speculative_config": NGRAMS}],
    ids=["ahead", "waiting", "ngrams"],
)
def test_requests_in_company_say_what_each_says_alone(settings, device, folders, monkeypatch):
    # While no step's time is known, each guess is taken: on a busy machine few would seem to pay.
    monkeypatch.setattr(StepTimeModel, "observe", lambda *args: None)
    requests = requests_of(folders, 12)
    engine = make_engine(vocabulary_backend(device), **settings)
    found = said(engine, requests, folders=folders)
    engine.sleep(on=True)
    engine.sleep(on=False)
    again = said(engine, requests)
    assert (engine.stats().spec_draft_tokens > 0) == ("speculative_config" in settings)
    engine.close()
    alone = make_engine(vocabulary_backend(device), async_scheduling=False)
    truth: dict[str, list[int]] = {}
    for request in requests:
        truth |= said(alone, [request])
    assert found == truth and again == truth
    assert len({tuple(tokens) for tokens in truth.values()}) == len(requests)
    alone.close()


@without_a_gpu
def test_a_pretended_gpu_says_what_the_cpu_says(pretended, folders, tmp_path):
    """Built and run as on a GPU: pinned memory, uploads by a thread, graphs."""
    folder = write_model(tmp_path, "llama")
    texts = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(
            model=folder, device=device, dtype="float32", max_model_len=128, num_threads=1,
            kv_cache_memory_bytes=8 << 20, enable_lora=True, max_loras=2,
            kernels="triton" if device == "cuda" else "auto",
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        )  # fmt: skip
        engine = build_engine(config)[0]
        chosen = [r for r in requests_of(folders, 6) if r.params.grammar is None]
        texts.append(said(engine, chosen, folders=folders))
        if device == "cuda":
            executor: Any = engine.executor
            graphs = executor._backend._graphs.captured
            assert any(isinstance(key, tuple) and key[0] is True for key in graphs)
        engine.close()
    assert texts[0] == texts[1]


# ── memory, and sleep ──


@without_a_gpu
def test_slots_that_do_not_fit_are_refused_with_what_to_lower(pretended):
    with pytest.raises(ConfigError, match=r"9000 slots .* rank 256 take .* lower --max-loras"):
        build("llama", pretended, adapters=AdapterLimits(9000, 256))


@without_a_gpu
def test_memory_for_partial_sums_and_more_graphs_is_counted(pretended):
    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.torch.memory import GRAPH_BYTES

    limits = BackendLimits(max_tokens=64, max_seqs=4, max_logit_rows=8, max_model_len=512)
    left, backends = [], []
    for adapters in (None, LIMITS):
        backend = build("llama", pretended, kernels="triton", adapters=adapters)
        for_kv = backend.kv_memory(limits, 1.0)
        assert for_kv is not None
        left.append(for_kv)
        backends.append(backend)
    assert backends[1]._adapters is not None
    needed = backends[1]._adapters.workspace_bytes(limits)
    assert needed > 0
    num_graphs = backends[0]._plan_buckets(limits).total
    assert left[0] - left[1] == needed + num_graphs * GRAPH_BYTES


@pytest.mark.parametrize("keep", [True, False])
def test_answers_are_the_same_after_each_level_of_sleep(keep, device, folders):
    backend = build("llama", device)
    token_ids = random_tokens(30, seed=2)
    before = run(backend, folders[1], token_ids)
    backend.release_kv()
    backend.release_weights(keep=keep)
    backend.restore_weights()
    backend.restore_kv()
    driver = AdaptedDriver(backend)
    driver.slots = {0: 1}  # nobody placed it again
    request = driver.add(0, token_ids)
    driver.step([(request, 30)])
    assert np.array_equal(np.array(request.logits), before)
    plain = run_alone(backend, token_ids)
    assert not np.array_equal(plain, before)
    backend.close()
