"""The engine's settings: each that cannot work is refused by its flag, before loading."""

import math

import pytest

from octavo_engine.config import (
    EngineConfig,
    EplbConfig,
    SchedulerConfig,
    SpeculationConfig,
    parse_media_limits,
)
from octavo_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", "gpu", "--device must be one of auto, cpu, cuda, plugin, torch, sim; got gpu"),
        ("dtype", "int3", "--dtype must be one of auto, bfloat16, float16, float32; got int3"),
        (
            "kv_cache_dtype",
            "float16",
            "--kv-cache-dtype must be one of auto, bfloat16, float32, int8, fp8, fp8_e4m3, "
            "fp8_e5m2; got float16",
        ),
        ("activation_bits", 4, "--activation-bits must be 8 or 16; got 4"),
        (
            "load_format",
            "pt",
            "--load-format must be one of auto, dummy, safetensors, gguf; got pt",
        ),
        ("max_model_len", 0, "--max-model-len must be at least 1; got 0"),
        ("num_threads", 0, "--num-threads must be from 1 to 1024; got 0"),
        ("num_threads", 10**6, "--num-threads must be from 1 to 1024; got 1000000"),
        ("memory_fraction", 0.0, "--memory-fraction must be above 0 and at most 1; got 0.0"),
        ("memory_fraction", float("nan"), "--memory-fraction must be above 0 and at most 1"),
        ("kv_cache_memory_bytes", -5, "--kv-cache-memory-bytes must be above 0; got -5"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_flag(field, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_num_seqs", 0, "--max-num-seqs must be at least 1; got 0"),
        ("max_num_batched_tokens", 0, "--max-num-batched-tokens must be at least 1; got 0"),
        ("max_queue", 0, "--max-queue must be at least 1; got 0"),
        ("max_step_ms", 0.0, "--max-step-ms must be above 0; got 0.0"),
        ("policy", "lifo", "--scheduling-policy must be one of fcfs, priority; got lifo"),
    ],
)
def test_so_is_one_of_the_scheduler(field, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(scheduler=SchedulerConfig(**{field: value}))


def test_the_model_answers_to_its_reference_unless_named():
    assert EngineConfig(model="org/name").names == ("org/name",)
    assert EngineConfig(served_model_names=("a", "b")).names == ("a", "b")


def speculation(text: str) -> SpeculationConfig | None:
    return EngineConfig(speculative_config=text).speculation


def test_speculation_reads_as_vllms() -> None:
    assert EngineConfig().speculation is None
    assert speculation('{"method": "ngram"}') == SpeculationConfig(
        num_speculative_tokens=4, prompt_lookup_min=5, prompt_lookup_max=5
    )
    given = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_%s": 2}'
    for name in ("min", "max"):  # one of the two is both
        assert speculation(given % name) == SpeculationConfig(
            num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=2
        )
    both = '{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
    assert speculation('{"model": "m", "num_speculative_tokens": 3}') == SpeculationConfig(
        method="draft_model", model="m", num_speculative_tokens=3
    )
    assert speculation('{"method": "medusa", "model": "m"}') == SpeculationConfig(
        method="medusa", model="m"
    )
    for name in ("mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp"):
        assert speculation(f'{{"method": "{name}"}}') == SpeculationConfig(method="mtp")
    assert speculation('{"method": "suffix"}') == SpeculationConfig(
        method="suffix", num_speculative_tokens=24
    )
    given = '{"method": "suffix", "suffix_decoding_max_tree_depth": 100}'
    assert speculation(given) == SpeculationConfig(
        method="suffix", num_speculative_tokens=64, suffix_decoding_max_tree_depth=100
    )
    assert speculation(both) == SpeculationConfig(prompt_lookup_min=2, prompt_lookup_max=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "--speculative-config is not valid JSON"),
        ("[]", "--speculative-config must be a JSON object"),
        ("{}", "must have a method, one of ngram, suffix, draft_model, medusa, mlp_speculator,"),
        ('{"method": "guess"}', "must have a method, .* got method 'guess'"),
        ('{"method": "mlp_speculator"}', "method mlp_speculator needs the field model"),
        ('{"method": "eagle3"}', "method eagle3 needs the field model"),
        ('{"method": "mtp", "model": "m"}', "a field model, which the method mtp does not take"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 0}', "from 1 to 1024; got 0"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 2.5}', "a whole number; got 2.5"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": "a"}', "a number; got 'a'"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": NaN}', "from 0 to 1; got nan"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": -1}', "from 0 to 64; got -1"),
        ('{"method": "suffix", "prompt_lookup_min": 2}', "which the method suffix does not take"),
        ('{"method": "draft_model"}', "method draft_model needs the field model"),
        ('{"method": "medusa", "model": ""}', "method medusa needs the field model"),
        ('{"model": 3}', "model must be a string; got 3"),
        ('{"model": "m", "prompt_lookup_min": 3}', "prompt_lookup_min, which the method draft_mod"),
        ('{"model": "m", "quantization": "awq"}', "quantization must be one of auto, none, int8"),
        ('{"method": "ngram", "model": "m"}', "a field model, which the method ngram does not"),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', "must be a whole number; got '4'"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "a whole number; got True"),
        ('{"method": "ngram", "num_speculative_tokens": 65}', "must be from 1 to 64; got 65"),
        ('{"method": "ngram", "prompt_lookup_max": 0}', "prompt_lookup_max must be from 1 to 64"),
        ('{"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}',
         "prompt_lookup_min must not be above prompt_lookup_max; got 3 and 2"),
    ],
)  # fmt: skip
def test_speculation_that_cannot_be_is_refused_at_start(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=text)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ('{"image": 4}', {"image": 4}),
        ('{"image": {"count": 2}, "video": 0}', {"image": 2, "video": 0}),
        ("image=4", {"image": 4}),
        ("image=0, audio=1", {"image": 0, "audio": 1}),
        ("{}", {}),
    ],
)
def test_limits_of_media_have_both_forms_of_vllm(text, limits):
    assert parse_media_limits(text) == limits
    config = EngineConfig(limit_mm_per_prompt=text)
    for kind in ("image", "audio"):
        assert config.max_media_per_prompt(kind) == limits.get(kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"images": 4}', "takes image, video, audio; got 'images'"),
        ('{"image": -1}', "image must be a whole number, 0 or above; got -1"),
        ('{"image": true}', "image must be a whole number"),
        ('{"image": {"count": 1, "width": 9}}', "image takes only count"),
        ("[1]", "must be a JSON object"),
        ('{"image": 1', "is not valid JSON"),
        ("image", "must be like image=4,video=0"),
        ("image=-1", "must be like image=4"),
        ("image=1,image=2", "must be like image=4"),
        ("", "must be like image=4"),
    ],
)
def test_limits_of_media_that_mean_nothing_are_refused(text, message):
    with pytest.raises(ConfigError, match=r"^--limit-mm-per-prompt") as caught:
        EngineConfig(limit_mm_per_prompt=text)
    assert message in str(caught.value)


@pytest.mark.parametrize("size", [-1.0, math.inf, math.nan])
def test_the_cache_of_pictures_has_a_size(size):
    with pytest.raises(ConfigError, match="--mm-processor-cache-gb must be at least 0; got"):
        EngineConfig(mm_processor_cache_gb=size)


def test_processor_settings_are_an_object():
    with pytest.raises(ConfigError, match="--mm-processor-kwargs must be a JSON object"):
        EngineConfig(mm_processor_kwargs="4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "--eplb-config must be a JSON object"),
        ('{"window": 3}', "--eplb-config has an unknown field window; known: window_size, step_in"),
        ('{"window_size": "3"}', "--eplb-config: window_size has the wrong type; got '3'"),
        ('{"window_size": true}', "--eplb-config: window_size has the wrong type; got True"),
        ('{"log_balancedness": 1}', "--eplb-config: log_balancedness has the wrong type; got 1"),
        ('{"step_interval": 0}', "--eplb-config: step_interval must be from 1 to 1000000; got 0"),
        (
            '{"num_redundant_experts": -1}',
            "--eplb-config: num_redundant_experts must be from 0 to 1000000; got -1",
        ),
        (
            '{"window_size": 50, "step_interval": 20}',
            "--eplb-config: window_size must not be above step_interval; got 50 and 20",
        ),
    ],
)
def test_when_experts_may_move(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(eplb_config=text)
    assert message in str(caught.value)


def test_experts_move_only_if_ranks_have_them_as_a_whole() -> None:
    with pytest.raises(ConfigError, match="it needs --enable-expert-parallel"):
        EngineConfig(enable_eplb=True)
    fields = '{"window_size": 7, "step_interval": 9}'
    config = EngineConfig(enable_expert_parallel=True, enable_eplb=True, eplb_config=fields)
    assert config.eplb == EplbConfig(window_size=7, step_interval=9)
    assert config.replace(eplb_config=None).eplb == EplbConfig()
    assert config.replace(enable_eplb=False).eplb is None


@pytest.mark.parametrize(
    ("window", "interval", "begins"), [(1, 1, 0), (1000, 3000, 2000), (5, 5, 0), (1, 4, 3)]
)
def test_where_a_window_begins(window: int, interval: int, begins: int) -> None:
    config = EplbConfig(window_size=window, step_interval=interval)
    assert config.first_step_of_window == begins
