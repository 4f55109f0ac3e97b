"""Every example runs: against real servers with the demo models, or rendered and checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import yaml

from octavo import cli
from tests.docs.pages import ROOT
from tests.fakes.chart import Chart
from tests.fakes.process import serving
from tests.fakes.router_process import routing
from tests.tools import build as tools_build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
SMALL = ("--device", "cpu", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "2048")
CLIENTS = {
    "openai_client.py": ("openai", "Paris"),
    "streaming.py": ("openai", " tokens"),
    "tools.py": ("openai", "temperature {'city': '"),
    "json_schema.py": ("openai", "'continent': '"),
    "rag.py": ("httpx", "eight leaves"),
    "langchain_chat.py": ("langchain_openai", "Paris"),
    "litellm_client.py": ("litellm", "Paris"),
}


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """Where the examples find a chat model and an encoder."""
    with (
        serving("demo://smollm2", "--served-model-name", "smollm2", *SMALL) as chat,
        serving("demo://minilm", "--served-model-name", "minilm", "--device", "cpu") as embed,
    ):
        yield {**os.environ, "OCTAVO_URL": chat.url, "OCTAVO_EMBED_URL": embed.url}


def output_of(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_example_is_tested_and_listed():
    listed = (EXAMPLES / "README.md").read_text()
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs == set(CLIENTS)
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or f"({path.name})" in listed


def install(package: str, folder: Path) -> bool:
    """Beside the environment: some clients bring hundreds of megabytes."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target"]
    command += [str(folder), package.replace("_", "-")]
    return subprocess.run(command, check=False, capture_output=True, timeout=400).returncode == 0


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_gets_its_answer(name, environ, tmp_path):
    package, wanted = CLIENTS[name]
    if find_spec(package) is None:
        if not install(package, tmp_path):
            compile((EXAMPLES / name).read_text(), name, "exec")
            pytest.skip(f"{package} cannot be installed: only compiled")
        environ = {**environ, "PYTHONPATH": str(tmp_path)}
    assert wanted in output_of([sys.executable, str(EXAMPLES / name)], environ)
    shutil.rmtree(tmp_path)


def test_the_notebook_runs(capsys):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # what the page shows
    assert "The capital of France is Paris." in capsys.readouterr().out


def test_the_batch_is_answered(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "octavo").write_text(f'#!/bin/sh\nexec {sys.executable} -m octavo.cli "$@"\n')
    (programs / "octavo").chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(sys.path),
        "OCTAVO_KV_CACHE_MEMORY_BYTES": "64MiB",
    }
    answers = tmp_path / "answers.jsonl"
    output_of([str(EXAMPLES / "batch" / "run.sh"), str(answers)], environ)
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["france", "italy"]
    assert all(line["response"]["status_code"] == 200 for line in lines)


def test_the_routing_policy_decides(environ):
    file = EXAMPLES / "routing_policy" / "router.yaml"
    with routing("--config", str(file), "--upstreams", environ["OCTAVO_URL"]) as router:
        router.until(lambda: set(router.states().values()) == {"ready"})
        body = {"model": "smollm2", "prompt": "Once", "max_tokens": 1}
        answer = router.client.post("/v1/completions", json=body, headers={"x-octavo-explain": "1"})
    assert json.loads(answer.headers["x-octavo-explain"])["policy"] == "prefix-first"


@pytest.mark.skipif(bool(tools_build.why_not()), reason="helm cannot be built here")
@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_the_chart_takes_the_values(size):
    values = yaml.safe_load((EXAMPLES / "helm" / f"{size}.yaml").read_text())
    with Chart() as chart:
        objects = chart.objects(values)
    routers = [
        each
        for each in objects
        if each["kind"] == "Deployment" and "router" in str(each["metadata"])
    ]
    assert routers[0]["spec"]["replicas"] == values["router"]["replicas"]


def test_the_serving_runtime_starts_our_engine(capsys):
    runtime, service = yaml.safe_load_all((EXAMPLES / "kserve" / "servingruntime.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"  # KServe's own condition
    assert cli.main((*container["args"], "--print-config")) == 0
    assert "port = 8080" in capsys.readouterr().out
    ports = {probe["httpGet"]["port"] for name, probe in container.items() if "Probe" in name}
    assert ports == {8080} == {each["containerPort"] for each in container["ports"]}
    (form,) = runtime["spec"]["supportedModelFormats"]
    model = service["spec"]["predictor"]["model"]
    assert model["modelFormat"]["name"] == form["name"]
    assert model["runtime"] == runtime["metadata"]["name"]
