"""Whatever is in the YAML: a spec, or SpecInvalid with a field and a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_operator.desired import desired_objects
from octavo_operator.errors import SpecInvalid
from octavo_operator.spec import LLMDeployment
from tests.fakes.deployments import make_body, with_images
from tests.fakes.random_specs import JUNK, spec_schema, specs

SCHEMA = spec_schema()
FIELDS = st.sampled_from([*sorted(SCHEMA["properties"]), "podTemplate", "unknown"])
POD_TEMPLATE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}},
    "spec": {
        "containers": [{"name": "engine", "env": [{"name": "A", "value": "x"}]}],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "tolerations": [{"key": "a"}],
        "nodeSelector": {"a": "b"},
    },
}


def check(body: Any) -> None:
    try:
        deployment = LLMDeployment.parse(body)
    except SpecInvalid as error:
        assert error.field
        assert error.problem
        assert error.reason in ("SpecInvalid", "Unsupported", "UnsupportedVersion")
        assert len(str(error)) < 1024
        return
    assert desired_objects(deployment, with_images())


@pytest.mark.slow
@settings(max_examples=250, derandomize=True, deadline=None)
@given(specs(SCHEMA))
def test_specs_near_the_schema(spec: dict[str, Any]):
    check(make_body(spec))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.dictionaries(FIELDS, JUNK, max_size=4))
def test_any_value_in_any_section(spec: dict[str, Any]):
    check(make_body(spec))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(JUNK)
def test_any_body(body: Any):
    check(body)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status", "kind"]), JUNK))
def test_any_part_of_a_body(parts: dict[str, Any]):
    check({**make_body(), **parts})


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.data())
def test_a_pod_template_with_anything_anywhere(data: st.DataObject):
    check(make_body({"podTemplate": data.draw(damaged(POD_TEMPLATE))}))


def damaged(value: Any) -> st.SearchStrategy[Any]:
    """`value` with one part of it replaced by junk."""
    if isinstance(value, dict) and value:
        keys = st.sampled_from(sorted(value))
        inside = keys.flatmap(lambda k: damaged(value[k]).map(lambda new: {**value, k: new}))
        return JUNK | inside
    if isinstance(value, list) and value:
        return JUNK | damaged(value[0]).map(lambda new: [new, *value[1:]])
    return JUNK
