"""docs/operator.md says what the code does: reasons, flags, metrics, objects, examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from octavo_operator import cli, metrics
from octavo_operator.objects import kinds
from octavo_operator.reasons import Reason
from octavo_operator.report import reasons_docs
from octavo_operator.spec import LLMDeployment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / reasons_docs.PAGE).read_text(encoding="utf-8")


def blocks() -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)


def test_the_reasons_are_current():
    assert reasons_docs.with_reasons(PAGE) == PAGE, (
        "run python -m octavo_operator.report.reasons_docs"
    )


def test_every_reason_is_below_a_title():
    reported = reasons_docs.with_reasons(PAGE).partition(reasons_docs.BEGIN)[2]
    assert reported.lstrip().startswith("### The spec")
    assert [f"`{reason}`" in reported for reason in Reason] == [True] * len(Reason)


def test_a_page_without_the_marks_is_an_error():
    with pytest.raises(ValueError, match="must have the lines"):
        reasons_docs.with_reasons("# Operator\n")


def test_the_example_is_a_deployment():
    example = yaml.safe_load(blocks()[0])
    example["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1}
    assert LLMDeployment.parse(example).model.uri == "demo://smollm2"


def test_flags_that_are_named_exist():
    flags = {name for name, _, _ in cli._FLAGS} | {"help"}
    elsewhere = {"server-side", "replicas", "previous", "from-literal"}  # of kubectl
    elsewhere |= {"create-namespace", "set"}  # of helm
    assert set(re.findall(r"--([a-z][a-z-]+)", PAGE)) - elsewhere <= flags


def test_every_metric_is_named():
    names = {
        value.removeprefix("octavo_operator_")
        for value in vars(metrics).values()
        if isinstance(value, str) and value.startswith("octavo_operator_")
    }
    table = PAGE.partition("| metric `octavo_operator_…` |")[2].partition("\n\n")[0]
    reported = {
        re.sub(r"(_total)?(\{.*\})?$", "", name) for name in re.findall(r"`([^`]+)`", table)
    }
    assert reported == names


def test_objects_that_it_becomes_are_those_that_it_may_own():
    table = PAGE.partition("| object | name | when |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    reported = {word for cell in cells for word in re.findall(r"[A-Z][A-Za-z]+", cell)}
    assert reported == {kind.name for kind in kinds.OWNED}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
