"""A generation that broke off is continued elsewhere from its tokens, without a difference.

On the native backend and a real model: the resumed tokens equal those of the unbroken run, wherever
it broke, sampled or greedy, and their log-probabilities do to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.build import build_engine
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.core.engine import Engine
    from octavo_engine.state.outputs import TokenLogprobs

pytestmark = pytest.mark.slow

PROMPT = [504, 3575, 282, 4649, 314] * 5  # crosses a block
LENGTH = 20


def make_engine(max_num_batched_tokens: int) -> Engine:
    scheduler = SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens)
    config = EngineConfig(device="cpu", kv_cache_memory_bytes=2**24, scheduler=scheduler)
    return build_engine(config)[0]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """One where it breaks off, and one, which cuts prompts otherwise, where it goes on."""
    pair = make_engine(2048), make_engine(7)
    yield pair
    for engine in pair:
        engine.close()


def generate(
    engine: Engine, params: SamplingParams, given: list[int]
) -> tuple[list[int], list[TokenLogprobs]]:
    engine.reset_prefix_cache()
    engine.add(
        EngineRequest(
            request_id="r", prompt_token_ids=PROMPT, params=params, output_token_ids=given, seed=77
        )
    )
    tokens, logprobs = list(given), []
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            tokens += output.token_ids
            logprobs += output.logprobs
    return tokens, logprobs


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 1.1, "top_p": 0.9}, {"presence_penalty": 1.5}],
    ids=["greedy", "sampled", "penalised"],
)
def test_wherever_it_broke_it_goes_on_as_if_it_had_not(engines, sampling):
    here, there = engines
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=2, **sampling)
    tokens, logprobs = generate(here, params, [])
    assert len(tokens) == LENGTH

    for broke_at in (1, 6, 7, 8, LENGTH - 1):  # 25 + 7 tokens fill two blocks
        resumed, rest = generate(there, params, tokens[:broke_at])
        assert resumed == tokens
        assert rest == logprobs[broke_at:]
