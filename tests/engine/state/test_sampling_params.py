"""What a request may ask for: every bad value is refused by the name of its field."""

import math

import pytest

from octavo_engine.errors import InvalidRequest
from octavo_engine.state.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("n", 0, "must be between 1 and 128; got 0"),
        ("n", 2.0, "must be a whole number; got 2.0"),
        ("n", True, "must be a whole number; got True"),
        ("temperature", -0.1, "must be between 0 and 10000; got -0.1"),
        ("temperature", math.nan, "must be between 0 and 10000; got nan"),
        ("temperature", math.inf, "must be between 0 and 10000; got inf"),
        ("temperature", "1", "must be a number; got '1'"),
        ("top_p", 1.01, "must be between 0 and 1; got 1.01"),
        ("top_k", -2, "must be between -1 and 2147483647; got -2"),
        ("min_p", None, "must be a number; got None"),
        ("presence_penalty", 2.1, "must be between -2 and 2; got 2.1"),
        ("repetition_penalty", 0.0, "must be above 0"),
        ("seed", 2**63, "must be between -9223372036854775808 and 9223372036854775807; got"),
        ("max_tokens", 0, "must be between 1 and 2147483647; got 0"),
        ("min_tokens", 17, "(17) is above max_tokens (16)"),
        ("logprobs", -2, "must be between -1 and 2147483647; got -2"),
        ("stop", ("",), "strings must not be empty"),
        ("stop", (3,), "must be strings"),
        ("allowed_token_ids", (), "must not be empty"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value, rule):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert f"{field} {rule}" in caught.value.message


def test_a_bias_that_is_no_number_is_refused_by_its_token():
    with pytest.raises(InvalidRequest, match=r"logit_bias\[7\] is not a number"):
        SamplingParams(logit_bias={7: math.nan})


def test_one_stop_string_is_one_and_not_its_letters():
    assert SamplingParams(stop="abc").stop == ("abc",)  # type: ignore[arg-type]  # as people write
    assert SamplingParams(stop=("a", "b")).stop == ("a", "b")


def test_the_limits_themselves_are_allowed():
    params = SamplingParams(
        n=128, temperature=0.0, top_p=1.0, top_k=-1, min_p=1.0, seed=-(2**63), min_tokens=16
    )
    assert params.is_greedy
