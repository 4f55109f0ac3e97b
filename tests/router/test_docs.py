"""docs/router.md says what the code does: settings, errors, metrics, policies, examples."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest
import yaml

from octavo_engine.protocol import metric_names
from octavo_router import errors
from octavo_router.config import check, docs
from octavo_router.config.load import load_config, parse_part
from octavo_router.config.settings import KeyConfig, UpstreamConfig
from octavo_router.discovery.kubernetes.routing import RoutingAnnotation
from octavo_router.flow.keys import make_table
from octavo_router.proxy.paths import PROXIED
from tests.tools.source_trees import parsed_source

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "router" / "octavo_router"
PAGE = (ROOT / docs.PAGE).read_text(encoding="utf-8")


def section(title: str) -> str:
    """From a heading to the next one of its rank."""
    found = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^\1 |\Z)", PAGE, re.M | re.S)
    assert found, title
    return found[2]


def rows(text: str) -> list[list[str]]:
    """The cells of a section's first table, without its head."""
    lines = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert lines
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()][2:]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def example(first_line: str) -> str:
    blocks: list[str] = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    return next(block for block in blocks if block.startswith(first_line))


def refusals() -> dict[tuple[int, str], set[bool]]:
    """(status, code) of every error in the sources, with whether it tells when to come back."""
    found: dict[tuple[int, str], set[bool]] = {}
    for path in SOURCES.rglob("*.py"):
        if "epp" in path.relative_to(SOURCES).parts:
            continue  # a gateway's clients see these: docs/gateway-api.md
        for node in ast.walk(parsed_source(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in ("Rejected", "_refused") or len(node.args) < 2:
                continue
            status, code = node.args[:2]
            if not isinstance(status, ast.Constant) or not isinstance(status.value, int):
                continue
            codes = [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]
            tells = any(keyword.arg == "retry_after_s" for keyword in node.keywords)
            for one in codes:
                found.setdefault((status.value, code_of(one)), set()).add(tells)
    return found


def code_of(node: ast.expr) -> str:
    """A literal, or the name of a constant in `errors`."""
    if isinstance(node, ast.Name):
        return str(getattr(errors, node.id))
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return str(node.value)


def test_the_settings_are_current():
    assert docs.with_settings(PAGE) == PAGE, "run python -m octavo_router.config.docs"


def test_a_page_without_the_marks_is_an_error():
    with pytest.raises(ValueError, match="must have the lines"):
        docs.with_settings("# Router\n")


def test_every_error_is_in_the_table_and_no_other():
    reported = {
        (int(row[0]), row[1].strip("`")): row[2] == "yes" for row in rows(section("Errors"))
    }
    found = refusals()
    assert reported.keys() == found.keys()
    for key, tells in found.items():
        assert reported[key] in tells, key


def test_every_metric_is_in_the_table_and_no_other():
    reported = {
        name.removesuffix("_total")
        for row in rows(section("Looking at it"))
        for name in names(row[1])
    }
    prefix = metric_names.ROUTER_PREFIX
    known = {
        value.removeprefix(prefix)
        for name, value in vars(metric_names).items()
        if name.startswith("ROUTER_") and name not in ("ROUTER_PREFIX", "ROUTER_INFO")
    }
    assert reported == known | {"info"}


def test_every_policy_that_can_be_had_is_in_the_table():
    reported = {row[0].split("`")[1] for row in rows(section("Policies"))}
    assert reported == set(check.POLICIES)
    profiles = section("Policies").partition("**Profiles**")[2]
    assert {*check.FILTER_NAMES, *check.SCORER_NAMES} <= names(profiles)


def test_the_paths_that_are_let_through_are_those_in_the_list():
    listed = section("Quick start").partition("these paths only:")[2].partition(". An engine")[0]
    assert names(listed) == set(PROXIED)


def test_the_fields_of_the_annotation_are_those_that_are_read():
    reported = {name for row in rows(section("Kubernetes")) for name in names(row[0])}
    assert reported == {field.encode_name for field in msgspec.structs.fields(RoutingAnnotation)}


def test_the_example_of_an_annotation_can_be_read():
    service = yaml.safe_load(example("apiVersion: v1\nkind: Service\nmetadata:\n  name: vllm"))
    text = service["metadata"]["annotations"]["octavo.dev/routing"]
    assert msgspec.json.decode(text, type=RoutingAnnotation).kv_events_port == 5557


def test_the_example_of_a_configuration_loads():
    config = load_config(text=example("# router.yaml"))
    assert [pool.policy for pool in config.routing.pools] == ["careful"]
    assert UpstreamConfig(url="http://10.0.0.1:8000") in config.discovery.upstreams
    assert config.models[0].alias_of == "smollm2"


def test_the_example_of_keys_loads():
    keys = parse_part(example("# keys.yaml"), "keys", KeyConfig)
    table = make_table(keys, {"TEAM_A_KEY": "a", "PIPELINE_KEY": "p"})
    assert {limits.tenant for limits in table.limits.values()} == {
        "team-a",
        "team-b",
        "pipeline",
    }


def test_the_rights_are_those_that_the_page_names():
    text = (ROOT / "manifests" / "base" / "router.yaml").read_text(encoding="utf-8")
    role = next(one for one in yaml.safe_load_all(text) if one["kind"] == "ClusterRole")
    granted = {
        resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]
    }
    followed = {name: {"list", "watch"} for name in ("pods", "services", "endpointslices")}
    assert granted == followed | {"llmdeployments": {"get", "list"}}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
