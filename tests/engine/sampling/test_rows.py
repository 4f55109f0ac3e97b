"""A request's sampling parameters in the kernel's table."""

from __future__ import annotations

import pytest

from octavo_engine.sampling.batch import SAMPLING_ROW
from octavo_engine.sampling.rows import fill_row, new_table
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams


def make_request(seed: int = 0, **params: object) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
    )


def test_a_record_is_as_large_as_the_kernel_expects() -> None:
    assert SAMPLING_ROW.itemsize == 40


def test_every_parameter_arrives() -> None:
    table = new_table(2)
    fill_row(
        table,
        1,
        make_request(
            seed=77,
            temperature=0.5,
            top_p=0.25,
            min_p=0.125,
            top_k=9,
            repetition_penalty=1.5,
            frequency_penalty=-1.0,
            presence_penalty=2.0,
        ),
    )
    assert table[1].tolist() == (77, 0.5, 0.25, 0.125, 1.5, -1.0, 2.0, 9, 3)
    assert table[0].tolist() == (0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0)


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_ways_to_say_all_tokens(top_k: int) -> None:
    table = new_table(1)
    fill_row(table, 0, make_request(top_k=top_k))
    assert table["top_k"][0] == 0


@pytest.mark.parametrize(
    ("seed", "key"), [(0, 0), (-1, 2**64 - 1), (2**63 - 1, 2**63 - 1), (2**64 - 1, 2**64 - 1)]
)
def test_every_seed_is_a_key(seed: int, key: int) -> None:
    table = new_table(1)
    fill_row(table, 0, make_request(seed=seed))
    assert int(table["seed"][0]) == key
