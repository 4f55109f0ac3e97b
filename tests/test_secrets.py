"""Secrets in every place that takes one, and the search for them in all that was written."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import yaml

from octavo_operator.settings import OperatorSettings, RouterSettings
from tests.engine.server.test_traces import collector
from tests.fakes.canary import Canaries, files_of
from tests.fakes.model_store import Store, StoreReply
from tests.fakes.model_store import serving as storing
from tests.fakes.operator import OperatorBench
from tests.fakes.process import environment, serving
from tests.fakes.router_process import routing
from tests.octavo.local.test_up import YAML, running

if TYPE_CHECKING:
    from pathlib import Path

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS, TOKENIZE = "/v1/messages", "/v1/embeddings", "/tokenize"
PAGES = (
    "/metrics", "/server_info", "/version", "/load", "/openapi.json", "/debug/config",
    "/debug/decisions", "/debug/index", "/debug/endpoints", "/debug/tasks", "/octavo/v1/state",
    "/v1/models", "/",
)  # fmt: skip


def bodies(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Served and refused requests with this text wherever a client's text may be."""
    said = [{"role": "user", "content": text}]
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}
    schema = {"type": "object", "properties": {text: {"type": "integer"}}}
    return [
        (CHAT, {"messages": said, "max_tokens": 2, "tools": [tool], "user": text}),
        (CHAT, {"messages": said, "max_tokens": 2, "stream": True, "stop": [text]}),
        (CHAT, {"messages": said, "temperature": -1}),
        (CHAT, {"messages": [{"role": text, "content": text}]}),
        (COMPLETIONS, {"prompt": text, "max_tokens": 2, "structured_outputs": {"json": schema}}),
        (COMPLETIONS, {"prompt": text, "structured_outputs": {"regex": f"({text}"}}),
        (COMPLETIONS, {"prompt": text, "n": 10**9, text: text}),
        (RESPONSES, {"input": text, "instructions": text, "max_output_tokens": 2}),
        (MESSAGES, {"messages": said, "system": text, "max_tokens": 2}),
        (EMBEDDINGS, {"input": text}),
        (TOKENIZE, {"prompt": text}),
    ]


def call_everything(url: str, key: str, admin: str, wrong: str, text: str) -> dict[str, Any]:
    """Every body with a good and a wrong key; the pages as an administrator sees them."""
    with httpx.Client(base_url=url, timeout=60) as client:
        statuses = []
        for shown in (key, wrong):
            headers = {"authorization": f"Bearer {shown}", "x-api-key": shown}
            for path, body in bodies(text):
                answer = client.post(path, headers=headers, json={"model": "m", **body})
                statuses.append(answer.status_code)
            broken = client.post(CHAT, headers=headers, content=f'{{"messages": "{text}'.encode())
            statuses.append(broken.status_code)
        assert {200, 400, 401} <= set(statuses), statuses
        headers = {"authorization": f"Bearer {admin}"}
        return {f"{url}{page}": client.get(page, headers=headers).text for page in PAGES}


def arguments_of(pid: int) -> str:
    parent = psutil.Process(pid)
    return "\n".join(
        " ".join(process.cmdline()) for process in (parent, *parent.children(recursive=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("level", ["info", "debug"])
def test_nothing_that_engine_and_router_write_has_a_secret(tmp_path: Path, level: str):
    keys, texts = Canaries(), Canaries()
    text, wrong = texts.new("prompts"), keys.new("a wrong key")
    engine_key, engine_admin = keys.new("the engine's key"), keys.new("the engine's admin key")
    tenant, router_admin = keys.new("a tenant's key"), keys.new("the router's admin key")
    kv, files = tmp_path / "kv-secret", tmp_path / "files"
    kv.write_text(keys.new("the secret of KV transfers"))
    transfer = {
        "kv_connector": "OctavoConnector", "kv_role": "kv_both", "kv_port": 0,
        "kv_connector_extra_config": {"secret_file": str(kv)},
    }  # fmt: skip
    collecting = f"authorization=Bearer {keys.new('the token of the collector')}"
    engine_env = {
        "OCTAVO_API_KEY": engine_key, "OCTAVO_ADMIN_API_KEY": engine_admin,
        "HF_TOKEN": keys.new("the hub's token"), "OTEL_EXPORTER_OTLP_HEADERS": collecting,
    }  # fmt: skip
    router_env = {
        "OCTAVO_ROUTER_ADMIN_KEY": router_admin, "OCTAVO_ROUTER_ENGINE_KEY": engine_key,
        "OCTAVO_ROUTER_STATE_TOKEN": keys.new("the state token"),
        "OTEL_EXPORTER_OTLP_HEADERS": collecting,
    }  # fmt: skip
    keys_file = tmp_path / "keys.yaml"
    keys_file.write_text(yaml.safe_dump({"keys": [{"tenant": "t", "key": tenant}]}))
    flags = (
        "--access-log", "all", "--log-level", level, "--dev-mode", "--files-dir", str(files),
        "--kv-transfer-config", json.dumps(transfer), "--enable-log-requests",
        "--enable-log-outputs",
    )  # fmt: skip
    with (
        collector() as (traces_url, traces),
        serving("m", *flags, "--otlp-endpoint", traces_url, env=engine_env) as engine,
        routing(
            "--upstreams", engine.url, "--keys-file", str(keys_file), "--log-level", level,
            "--debug-endpoints", "--otlp-endpoint", traces_url, env=router_env,
        ) as router,
    ):  # fmt: skip
        written = call_everything(engine.url, engine_key, engine_admin, wrong, text)
        written |= call_everything(router.url, tenant, router_admin, wrong, text)
        written["arguments"] = arguments_of(engine.process.pid) + arguments_of(router.process.pid)
        written |= files_of(files)
        for part in (router, engine):
            part.signal(signal.SIGTERM)  # what is still to be logged is, then
            assert part.wait() == 0
        logs = {"the engine's log": engine.lines, "the router's log": router.log.read_text()}
    written |= {f"trace {number}": body for number, (_, body) in enumerate(traces)}
    assert traces and CHAT in str(logs)
    assert keys.find(written | logs) == []
    shown = {"the router's log": logs["the router's log"]} if level == "debug" else logs
    assert texts.find(written | shown) == []
    if level == "debug":  # as the flag says; and the search finds what is there
        assert texts.find(logs) == ["prompts in the engine's log"]


MODES = (0o600, 0o700)  # of a file with keys, and of its folder
LOCAL = YAML.format(replicas=1, decode_ms=1).replace(
    "    device: sim\n",
    """    device: sim
    env:
      - {{name: OCTAVO_API_KEY, valueFrom: {{secretKeyRef: {{name: keys, key: key}}}}}}
      - {{name: OCTAVO_ADMIN_API_KEY, valueFrom: {{secretKeyRef: {{name: keys, key: admin}}}}}}
      - {{name: HF_TOKEN, valueFrom: {{secretKeyRef: {{name: hub, key: HF_TOKEN}}}}}}
""".format(),
)


@pytest.mark.slow
def test_nothing_that_octavo_up_writes_has_a_secret(tmp_path: Path):
    canaries = Canaries()
    key, hub = canaries.new("the engine's key"), canaries.new("the hub's token")
    data = {"key": key, "admin": canaries.new("the engine's admin key")}
    text = canaries.new("prompts")
    documents = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": data},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"},
         "data": {"HF_TOKEN": base64.b64encode(hub.encode()).decode()}},
    ]  # fmt: skip
    whole = "\n---\n".join([LOCAL, *map(yaml.safe_dump, documents)])
    with running(tmp_path, text=whole) as up:
        up.replicas(1)
        written: dict[str, Any] = {}
        for path, body in bodies(text):
            shown = {"authorization": f"Bearer {key}"}
            httpx.post(up.url + path, json={"model": "sim", **body}, headers=shown, timeout=60)
        written |= {page: httpx.get(up.url + page, timeout=60).text for page in PAGES}
        for words in (("status",), ("status", "--json")):
            written[" ".join(words)] = up.run(*words).stdout
        written["arguments"] = arguments_of(up.process.pid)
        up.replace(whole.replace("replicas: 1", "replicas: none"))  # an error that could quote it
        up.read_until("kept the running state")
        config = up.home / "run" / "router.yaml"
        assert key in config.read_text()  # how the router gets it: in a file of its owner's
        assert (config.stat().st_mode & 0o777, config.parent.stat().st_mode & 0o777) == MODES
        up.run("down")
        assert up.wait() == 0
        written["its lines"] = "".join(up.lines)
        written |= files_of(up.home)
    assert any(name.startswith("logs/") for name in written)
    assert canaries.find(written) == []


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 401, 500])
def test_nothing_that_a_download_writes_has_its_token(tmp_path: Path, status: int):
    canaries = Canaries()
    token, password = canaries.new("the hub's token"), canaries.new("the AWS secret")
    store = Store(files={"/m.gguf": b"GGUF"})
    if status != 200:
        store.routes["/"] = lambda requested: StoreReply(status, b"no")
    with storing(store):
        done = subprocess.run(
            [sys.executable, "-m", "octavo.cli", "fetch", f"{store.url}/m.gguf",
             f"--to={tmp_path / 'to'}"],
            capture_output=True, text=True, timeout=120, check=False,
            env=environment(HF_TOKEN=token, AWS_SECRET_ACCESS_KEY=password, AWS_ACCESS_KEY_ID="a"),
        )  # fmt: skip
    assert (done.returncode == 0) == (status == 200), done.stdout
    written = {"its lines": done.stdout + done.stderr, **files_of(tmp_path)}
    assert canaries.find(written) == []


# What has the pods' variables, as the LLMDeployment has them: a value in a spec is no secret.
_HAS_VARIABLES = frozenset({"LLMDeployment", "Deployment", "Pod"})


def test_nothing_that_the_operator_writes_has_a_secret(caplog: pytest.LogCaptureFixture):
    """It may not read Secrets. What it has are variables of specs, which only pods get, and the
    token for routers."""
    caplog.set_level("DEBUG")
    canaries = Canaries()
    plain = {"name": "PLAIN", "value": canaries.new("a variable")}
    reference = {"secretKeyRef": {"name": "keys", "key": "api"}}
    env = [plain, {"name": "OCTAVO_API_KEY", "valueFrom": reference}]
    model = {"uri": "hf://org/model", "secretRef": {"name": "hub"}}
    routers = RouterSettings(token=canaries.new("the routers' token"))
    bench = OperatorBench(settings=OperatorSettings(router=routers))
    bench.create(model=model, engine={"env": env})
    bench.settle()
    bench.edit(engine={"env": [*env, plain]})  # refused: it is there twice
    bench.reconcile()
    assert bench.conditions()["Accepted"][0] == "False"
    written: dict[str, Any] = {
        "the log": caplog.text, "metrics": bench.metrics.render(), "settings": repr(routers),
        "status": {name: part for name, part in bench.deployment()["status"].items()
                   if name != "accepted"},  # the spec itself
    }  # fmt: skip
    for kind in {event.kind for event in bench.cluster.events}:
        for number, body in enumerate(bench.cluster.all(kind)):
            kept = body["metadata"] if kind.name in _HAS_VARIABLES else body
            written[f"{kind.name} {number}"] = kept
    assert "Event 0" in written
    assert canaries.find(written) == []
