"""Adapters in `octavo up`: the YAML of a cluster, real engines behind a real router."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.local.documents import read_documents
from octavo.local.routing import _pool
from octavo_engine.errors import ConfigError
from octavo_router.config.load import load_config
from octavo_router.config.settings import AdapterConfig
from tests.fakes.adapters import write_adapter
from tests.octavo.local.test_up import TIMEOUT_S, Traffic, running

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """apiVersion: octavo.dev/v1alpha1
kind: LLMDeployment
metadata: {name: sim}
spec:
  model: {uri: "demo://smollm2"}
"""
ADAPTER = """---
apiVersion: octavo.dev/v1alpha1
kind: LLMAdapter
metadata: {{name: {name}}}
spec: {{deployment: sim, uri: "file://{path}"}}
"""


def test_adapters_of_all_documents_are_those_of_their_deployment():
    text = HEAD + "  adapters: [{name: law, uri: 'hf://org/law', pinned: true}]\n"
    (one,) = read_documents(
        {"a.yaml": ADAPTER.format(name="tax", path="/tax"), "b.yaml": text}
    ).deployments
    assert [(a.name, a.lora_path, a.pinned) for a in one.adapters] == [
        ("law", "hf://org/law", True), ("tax", "/tax", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + ADAPTER.format(name="tax", path="/tax"), "take no adapters; add spec.lora to it"),
        (HEAD + "  lora: {}\n" + 2 * ADAPTER.format(name="tax", path="/tax"), "is there twice"),
        (HEAD + "  lora: {}\n" + ADAPTER.format(name="sim", path="/tax"), "the name sim already"),
        (HEAD + ADAPTER.replace("sim", "other").format(name="a", path="/a"), "no LLMDeployment"),
        (HEAD + ADAPTER.format(name="a", path="relative"), "file:///ABSOLUTE/PATH"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_one_sentence(text: str, says: str):
    with pytest.raises(ConfigError, match=r"LLMAdapter|document") as error:
        read_documents({"a.yaml": text})
    assert says in str(error.value)


def test_a_canary_reaches_the_routers_file():
    text = (
        HEAD
        + """  adapters:
  - {name: law, uri: "file:///law"}
  - {name: next, uri: "file:///next", canary: {of: law, percent: 5}}
"""
    )
    (one,) = read_documents({"a.yaml": text}).deployments
    config = load_config(text=json.dumps({"routing": {"pools": [_pool(one, one.adapters)]}}))
    assert config.routing.pools[0].adapters == (
        AdapterConfig(name="law", uri="/law"),
        AdapterConfig(
            name="next", uri="/next", pinned=True, canary_of="law", canary_percent=5.0
        ),
    )  # fmt: skip


@pytest.mark.slow
def test_adapters_come_and_go_under_traffic_and_no_process_is_replaced(tmp_path: Path):
    path = write_adapter(tmp_path / "law", {"model.layers.0.self_attn.q_proj": (64, 64)})
    with running(tmp_path) as up:
        base = up.file.read_text() + "  lora: {maxLoras: 4}\n"
        old = up.state(lambda s: s["is_ready"])["pools"][0]["revision"]
        up.replace(base)  # its engines take no adapters yet: they are replaced once
        up.state(lambda s: {row["revision"] for row in s["pools"][0]["replicas"]} == {
            s["pools"][0]["revision"]} != {old})  # fmt: skip
        adapters = base + ADAPTER.format(name="law", path=path)
        up.replace(adapters + ADAPTER.format(name="bad", path=tmp_path / "none"))

        def phases(state: dict[str, Any]) -> dict[str, str]:
            return {one["name"]: one["phase"] for one in state["pools"][0]["adapters"]}

        state = up.state(lambda s: phases(s) == {"law": "Loaded", "bad": "Failed"})
        before = {row["pid"] for row in state["pools"][0]["replicas"]}
        bad = next(one for one in state["pools"][0]["adapters"] if one["name"] == "bad")
        assert "none" in bad["message"]
        url = state["url"]
        with httpx.Client(base_url=url, timeout=60) as client, Traffic(url) as traffic:
            listed = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
            assert listed["law"]["parent"] == "sim"

            def ask(model: str) -> httpx.Response:
                body = {"model": model, "prompt": "x" * 200, "max_tokens": 16, "temperature": 0}
                return client.post("/v1/completions", json=body)

            answers = {ask(model).json()["choices"][0]["text"] for model in ("sim", "law")}
            assert len(answers) == 2  # the adapter is used
            refused = ask("bad")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "adapter_not_loaded"
            traffic.goes_on()
            up.replace(base)
            state = up.state(lambda s: phases(s) == {})
            deadline = time.monotonic() + TIMEOUT_S
            while ask("law").status_code != 404:
                assert time.monotonic() < deadline, "the adapter is still served"
                time.sleep(0.05)
            traffic.goes_on()
            assert traffic.problems == []
        state = up.state(lambda s: s["is_ready"])
        assert {row["pid"] for row in state["pools"][0]["replicas"]} == before
