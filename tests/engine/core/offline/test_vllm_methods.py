"""`LLM`'s methods with vLLM's names: a queue, sleep, metrics, and errors that name what to do."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo_engine.errors import ConfigError, InvalidRequest, ModelError, OctavoError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPTS = ["The capital of France is", "One, two, three,"]


@pytest.fixture(scope="module")
def llm():
    with LLM("demo://smollm2", kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


def test_what_is_enqueued_is_answered_as_if_generated(llm):
    (expected,) = ([each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)],)
    assert llm.enqueue(PROMPTS[0], GREEDY) == ["0"]
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.enqueue([{}], GREEDY)
    with pytest.raises(InvalidRequest, match="wait_for_completion"):
        llm.sleep()
    assert llm.enqueue(PROMPTS[1:], GREEDY) == ["1"]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [each.request_id for each in outputs] == ["0", "1"]
    assert [each.outputs[0].token_ids for each in outputs] == expected
    assert llm.wait_for_completion() == []


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_model_wakes_with_the_same_answers(llm, level):
    before = llm.generate(PROMPTS, GREEDY)
    llm.sleep(level)
    llm.sleep(level)  # does no more
    for work in (lambda: llm.generate("x"), llm.wait_for_completion):
        with pytest.raises(OctavoError, match="wake_up"):
            work()
    assert _metrics(llm)["octavo_engine_sleep_state", "awake"] == 0
    llm.wake_up(tags=["weights"])
    assert _metrics(llm)["octavo_engine_sleep_state", "awake"] == 1
    after = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


def _metrics(llm: LLM) -> dict[tuple[str, str], float]:
    return {
        (each.name, each.labels.get("sleep_state", "")): each.value for each in llm.get_metrics()
    }


def test_metrics_count_tokens(llm):
    before = _metrics(llm)["octavo_generation_tokens_total", ""]
    llm.generate(PROMPTS, GREEDY)
    assert _metrics(llm)["octavo_generation_tokens_total", ""] == before + 12


def test_a_level_that_does_not_exist_is_refused(llm):
    with pytest.raises(InvalidRequest, match="level must be 1 or 2; got 3"):
        llm.sleep(3)


def test_what_there_is_not_is_explained(llm):
    with pytest.raises(OctavoError, match=r"collective_rpc is not supported.* wake_up"):
        llm.collective_rpc("reset_prefix_cache")
    with pytest.raises(OctavoError, match=r"apply_model is not supported.*adding-a-model"):
        llm.apply_model(print)


def test_the_demo_model_has_sampling_defaults(llm):
    assert llm.info.default_params == {"temperature": 0.2, "top_p": 0.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "awq"}, "quantization awq does not fit .*, which is gguf"),
        ({"load_format": "safetensors"}, "load_format safetensors does not fit .* is gguf"),
        ({"runner": "pooling"}, "runner pooling does not fit .*, which is for generating text"),
    ],
)
def test_a_statement_about_the_files_that_is_wrong_is_refused(settings, message):
    with pytest.raises(ModelError, match=message):
        LLM("demo://smollm2", **settings)


@pytest.mark.slow
def test_a_statement_about_the_files_that_is_right_changes_nothing():
    with LLM(
        "demo://smollm2", quantization="gguf", load_format="gguf", runner="generate",
        kv_cache_memory_bytes=64 << 20,
    ) as llm:  # fmt: skip
        assert llm.info.format == "gguf"


def test_an_encoder_does_not_generate():
    with pytest.raises(ModelError, match="runner generate does not fit demo://minilm"):
        LLM("demo://minilm", runner="generate")
    with pytest.raises(ConfigError, match="runner"):
        LLM("demo://minilm", runner="draw")  # type: ignore[arg-type]  # on purpose
