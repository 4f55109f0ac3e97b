"""Folders as people download them, through the whole engine: tokens are those of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ModelError
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.backends.driver import random_tokens
from tests.engine.models.tiny import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.models.tiny import TinyModel

VOCABULARY = 49152  # of the tokenizer that is at hand
NEW_TOKENS = 12


def the_model(name: str) -> TinyModel:
    return tiny_model(name, vocab_size=VOCABULARY)


def greedy(model: TinyModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            logits = model.reference(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon-new", "cohere2", "dbrx"])
def test_a_folder_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = the_model(name)
    model.reference.save_pretrained(tmp_path)
    prompts = [random_tokens(count, seed=count) for count in (40, 7, 61)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(tmp_path, tokenizer="demo://smollm2", dtype="float32", max_model_len=96) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.outputs[0].token_ids) == greedy(model, prompt)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["jamba", "lfm2", "mamba2", "granite4-moe", "nemotron-h", "qwen3-next", "zamba2"]
)
def test_a_folder_with_recurrent_states_too(name: str, tmp_path: Path) -> None:
    """With drafts asked for, and the second time from a snapshot."""
    model = the_model(name)
    model.reference.save_pretrained(tmp_path)
    prompts = [random_tokens(count, seed=count) for count in (300, 7, 61)]
    truth = [greedy(model, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(
        tmp_path,
        tokenizer="demo://smollm2",
        dtype="float32",
        max_model_len=320,
        max_num_batched_tokens=100,
        kv_cache_memory_bytes=1 << 26,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ) as llm:
        for cached in ([0, 0, 0], [288, 0, 48]):
            answers = llm.generate(prompts, params, use_tqdm=False)
            assert [list(answer.outputs[0].token_ids) for answer in answers] == truth
            assert [answer.num_cached_tokens for answer in answers] == cached


@pytest.mark.slow
def test_a_class_of_its_own_is_named_what_it_is(tmp_path: Path) -> None:
    """A checkpoint of a known family under another name."""
    model = the_model("gpt2")
    model.reference.config.architectures = ["MyCompanyForCausalLM"]
    model.reference.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("GPT2LMHeadModel", "MyCompanyForCausalLM"))
    settings: dict[str, Any] = {
        "tokenizer": "demo://smollm2",
        "dtype": "float32",
        "max_model_len": 96,
    }
    with pytest.raises(ModelError, match="'MyCompanyForCausalLM' is not supported"):
        LLM(tmp_path, **settings)
    prompt = random_tokens(20)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    overrides = {"architectures": ["GPT2LMHeadModel"]}
    with LLM(tmp_path, hf_overrides=overrides, **settings) as llm:
        (answer,) = llm.generate(prompt, params, use_tqdm=False)
    assert list(answer.outputs[0].token_ids) == greedy(model, prompt)
