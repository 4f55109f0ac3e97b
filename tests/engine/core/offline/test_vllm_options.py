"""`LLM(...)` and `SamplingParams(...)` with vLLM's names: accepted, or refused with advice."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo_engine.errors import ConfigError, InvalidRequest


def _any(**fields: Any) -> dict[str, Any]:
    return fields


def test_settings_that_change_nothing_are_accepted():
    theirs: dict[str, Any] = {
        "swap_space": 0, "trust_remote_code": False, "block_size": 16, "hf_overrides": None,
        "load_format": "safetensors", "enable_chunked_prefill": True, "disable_log_stats": False,
        "enforce_eager": True,
    }  # fmt: skip
    with LLM(device="sim", **theirs) as llm:
        assert llm.info.backend.startswith("sim")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory_utilization": 0.9}, "LLM(gpu_memory_utilization=0.9) is not supported: "
         "memory_fraction is the share of the memory that is free after loading"),
        ({"model_impl": "terratorch"}, "models are octavo's own or transformers'"),
        ({"swap_space": 4}, "kv_offloading_size of EngineConfig keeps KV blocks"),
        ({"quantization": "mxfp4"}, "LLM(quantization='mxfp4') is not supported: how weights are"),
        ({"log_config_file": "a"}, "`octavo serve --log-format` and `octavo serve --log-level`"),
        ({"dtype": "float8"}, "dtype must be one of auto, bfloat16, float16, float32; got float8"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be a whole number; got '2'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be a whole number; got 2.5"),
        ({"seed": True}, "seed must be a whole number; got True"),
        ({"memory_fraction": "half"}, "memory_fraction must be a number; got 'half'"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False; got 1"),
        ({"model": 3}, "model must be a string or a path; got 3"),
        ({"speculative_config": "ngram"}, "speculative_config must be a dict; got 'ngram'"),
        ({"allowed_local_media_path": "/a"}, "give pictures as data: URLs, PIL images, bytes"),
        ({"mm_processor_kwargs": {"resample": 2}}, "this model takes none: leave it out"),
        ({"limit_mm_per_prompt": {"picture": 1}}, "takes image, video, audio; got 'picture'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_had_are_one_sentence(settings, message):
    with pytest.raises(ConfigError) as caught:
        LLM(device="sim", **settings)
    assert message in str(caught.value)
    assert not re.search("(?<!serve )--", str(caught.value)), "arguments, not flags"


def test_several_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        LLM(device="sim", **_any(swap_space=4, max_modellen=9, gpu_memory_utilization=0.5))
    message = str(caught.value)
    assert message.startswith("3 settings cannot be used: (1) LLM(swap_space=4) is not supported")
    assert "did you mean max_model_len?" in message
    with pytest.raises(TypeError, match=r"^2 settings cannot be used: .*tensor_parallel_size\?"):
        LLM(device="sim", **_any(max_modellen=9, tensor_parallel=2))


def test_none_is_the_default_of_each_argument():
    names = inspect.signature(LLM.__init__).parameters
    unset: dict[str, Any] = {name: None for name in names if name not in ("self", "others")}
    with LLM(**{**unset, "device": "sim"}) as llm:
        assert llm.info.backend.startswith("sim")
    with pytest.raises(TypeError, match="no argument zzz"):
        LLM(device="sim", zzz=None)


def test_numbers_of_numpy_are_numbers():
    numbers: dict[str, Any] = {"max_num_seqs": np.int64(2), "memory_fraction": np.float32(0.25)}
    with LLM(device="sim", **numbers) as llm:
        assert llm.info.backend.startswith("sim")


def test_a_setting_that_only_the_configuration_has_is_named_there():
    with pytest.raises(TypeError, match=r"LLM.from_config\(EngineConfig\(model=…, stream_interval"):
        LLM(device="sim", stream_interval=4)


def test_an_unknown_argument_is_guessed_at():
    with pytest.raises(
        TypeError, match=r"LLM\(\) has no argument max_modellen; did you mean max_mo"
    ):
        LLM(device="sim", max_modellen=4)
    with pytest.raises(TypeError, match="LLM\\(\\) has no argument zzz; it has model, tokenizer, "):
        LLM(device="sim", zzz=4)


def test_sampling_parameters_that_change_nothing_are_accepted():
    theirs: dict[str, Any] = {
        "best_of": None, "structured_outputs": None, "spaces_between_special_tokens": True,
        "skip_clone": True, "truncate_prompt_tokens": None,
    }  # fmt: skip
    params = SamplingParams(top_k=4, **theirs)
    assert params == SamplingParams(top_k=4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("structured_outputs", {"json": {}}, "use grammar=structured_output(json=…)"),
        ("best_of", 4, "use n, and choose among the answers"),
        ("use_beam_search", True, "use LLM.beam_search with octavo.BeamSearchParams"),
        ("spaces_between_special_tokens", False, "texts are as the tokenizer decodes them"),
        ("extra_args", {"a": 1}, "in logits_processors"),
    ],
)
def test_sampling_parameters_that_cannot_be_had_name_ours(name, value, message):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} is not supported: ")
    assert message in str(caught.value)
    assert caught.value.param == name


def test_an_unknown_sampling_parameter_is_guessed_at():
    with pytest.raises(TypeError, match=r"has no field max_token; did you mean max_tokens\?"):
        SamplingParams(**_any(max_token=3))
    with pytest.raises(InvalidRequest, match="temperature must be a number"):
        SamplingParams(**_any(temperature="x", best_of=1))


def test_the_values_still_travel():
    params = SamplingParams(max_tokens=3, stop=("x",))
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert msgspec.structs.replace(params, max_tokens=4).max_tokens == 4
