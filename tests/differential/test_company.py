"""Nobody is told anything else because others are served too.

`python -m tests.differential` goes on with it for as long as one likes.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from octavo_engine.core.engine import Engine
from tests.differential import company
from tests.differential.difference import Difference
from tests.differential.models import (
    Settings,
    TinyModel,
    any_settings,
    any_speculation,
    any_tiny_model,
)
from tests.differential.wishes import Wisher


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_in_any_company_an_answer_is_what_it_is_alone(seed):
    rng = random.Random(seed)
    assert company.compare(any_tiny_model(rng), rng, num_engines=2, num_rounds=1) > 3


@pytest.mark.slow
@pytest.mark.parametrize("method", TinyModel.methods)
def test_speculation_of_each_method_changes_no_answer(method):
    """Each with drafts that are right and drafts that are not, where it can have both."""
    rng = random.Random(7)
    model = TinyModel("Gemma3")
    alone, wisher = company.Alone(model, rng), Wisher(rng)
    drafted = 0
    for number in range(12):
        if number >= 2 and drafted:  # on a busy machine drafts may not pay for a while
            break
        settings = dataclasses.replace(
            any_settings(rng), speculative_config=any_speculation(rng, [method])
        )
        llm = model.engine(settings)
        company.compare_round(alone, company.Company(llm, rng), wisher, rng, str(settings))
        assert isinstance(llm._engine, Engine)
        drafted += llm._engine.stats().spec_draft_tokens
        llm.close()
    alone.close()
    assert drafted > 0


def test_a_model_that_differs_is_found_out():
    """Or the tool would find nothing."""
    rng = random.Random(0)
    alone = company.Alone(TinyModel("Llama"), rng)
    other = TinyModel("Llama", (("kv_cache_dtype", "int8"),)).engine(any_settings(rng))
    wisher = Wisher(rng)
    with pytest.raises(Difference):
        for _ in range(20):
            company.compare_round(alone, company.Company(other, rng), wisher, rng, "here")
    other.close()
    alone.close()


def test_an_answer_that_was_cut_is_compared_as_far_as_it_came():
    rng = random.Random(1)
    llm = TinyModel("Qwen3").engine(Settings())
    wisher = Wisher(rng)
    wishes = [wisher.wish() for _ in range(30)]
    reported = company.Company(llm, rng).run([w for w in wishes if w.abort_after is not None])
    assert any(one.was_cut for one in reported)
    llm.close()
