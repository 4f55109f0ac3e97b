"""Model references: what each kind finds, and what is said when it finds nothing."""

import errno
import json
import os
from pathlib import Path

import httpx
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

from octavo_engine.errors import ModelError, NoSuchModel
from octavo_engine.weights.dummy import DummyCheckpoint
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import resolve_model


def make_model(folder: Path, config='{"model_type": "llama"}') -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    save_file({"a": np.ones(2, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_folder_is_itself(tmp_path):
    folder = make_model(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    files = resolve_model(str(folder))
    assert (files.path, files.kind) == (folder, "safetensors")
    assert files.config == {"model_type": "llama"}
    assert files.generation_config == {"temperature": 0.5}
    assert open_checkpoint(files).read("a", (2,)).dtype == "F32"
    assert resolve_model(f"file://{folder}").path == folder


def test_broken_generation_config_is_only_warned_of_but_a_broken_config_ends_it(tmp_path, caplog):
    folder = make_model(tmp_path / "m")
    (folder / "generation_config.json").write_text("{")
    assert resolve_model(str(folder)).generation_config == {}
    assert "generation_config.json is not valid JSON" in caplog.text
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config.json must hold a JSON object; it holds a list"):
        resolve_model(str(folder))
    (folder / "config.json").write_text("{'a'}")
    with pytest.raises(ModelError, match=r"config.json is not valid JSON"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "is not one of"),
        ("s3://bucket/model", "unknown scheme s3://; a model is a folder, a .gguf file, file://"),
        ("./nowhere", "nowhere does not exist"),
        ("file:///nowhere/at/all", "/nowhere/at/all does not exist"),
        ("demo://other", "demo://other is unknown; there is demo://smollm2"),
        ("hf://onlyname", "not of the form hf://ORG/NAME"),
        ("hf://../etc", "not of the form"),
        ("a" * 300 + "/b", "/b does not exist"),  # longer than a file system takes
        ("x" * 100_000, f"{'x' * 80!r} is not one of"),
    ],
)
def test_wrong_references_say_what_was_looked_for(reference, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model(reference)
    assert message in str(caught.value)


def test_demo_that_is_not_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"run `octavo fetch demo://smollm2`"):
        resolve_model("demo://smollm2")


def test_files_that_are_no_models(tmp_path):
    (tmp_path / "w.bin").write_bytes(b"x")
    (tmp_path / "w.safetensors").write_bytes(b"x")
    (tmp_path / "bad.gguf").write_bytes(b"PK\x03\x04 and more bytes")
    with pytest.raises(ModelError, match="pickle"):
        resolve_model(str(tmp_path / "w.bin"))
    with pytest.raises(ModelError, match="name the folder"):
        resolve_model(str(tmp_path / "w.safetensors"))
    with pytest.raises(ModelError, match=r"bad.gguf is not a usable GGUF file"):
        resolve_model(str(tmp_path / "bad.gguf"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither config.json nor a .gguf"):
        resolve_model(str(tmp_path / "empty"))


class FakeHub:
    """Answers as the hub client does; remembers what it was asked."""

    def __init__(self, monkeypatch, folder: Path, *, files=(), fails=None) -> None:
        self.requested: list[dict] = []
        self.files = list(files)
        self.fails = fails
        self.folder = folder
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.hf_hub_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", self.list_repo_files)

    def snapshot_download(self, **requested):
        self.requested.append(requested)
        if self.fails is not None:
            raise self.fails
        return str(self.folder)

    def hf_hub_download(self, **requested):
        self.requested.append(requested)
        return str(self.folder / requested["filename"])

    def list_repo_files(self, *, repo_id, revision):
        return self.files


@pytest.mark.parametrize("reference", ["org/name", "hf://org/name"])
def test_a_repository_is_fetched_without_pickles_or_code(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = FakeHub(monkeypatch, make_model(tmp_path / "snapshot"))
    assert resolve_model(reference, revision="v1").path == tmp_path / "snapshot"
    (requested,) = hub.requested
    assert (requested["repo_id"], requested["revision"]) == ("org/name", "v1")
    assert "*.safetensors" in requested["allow_patterns"]
    endings = (".json", ".jinja", ".safetensors", "tokenizer.model", "tiktoken.model", ".tiktoken")
    assert all(p.endswith(endings) for p in requested["allow_patterns"])


def test_code_of_a_repository_is_fetched_where_it_may_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = FakeHub(monkeypatch, make_model(tmp_path / "snapshot"))
    resolve_model("org/name", with_code=True)
    assert "*.py" in hub.requested[0]["allow_patterns"]


def test_files_from_the_hub_go_to_the_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = FakeHub(monkeypatch, make_model(tmp_path / "snapshot"))
    files = resolve_model("org/name", download_dir="/big")
    files.with_overrides({}).with_tokenizer("org/other")
    assert [(each["repo_id"], each["cache_dir"]) for each in hub.requested] == [
        ("org/name", "/big"), ("org/other", "/big"),
    ]  # fmt: skip
    resolve_model("org/name")
    assert "cache_dir" not in hub.requested[-1], "the Hub's own cache"


def test_a_folder_that_may_not_be_read_is_one_sentence(tmp_path, monkeypatch):
    """Root may read all there is, so modes of files would show nothing here."""
    folder = make_model(tmp_path / "locked")
    exists = Path.exists

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "exists", lambda self: refuse(self) if self.suffix == ".json" else exists(self)
        )
        with pytest.raises(ModelError, match=r"json cannot be read: Permission denied; check"):
            resolve_model(str(folder))
    (folder / "config.json").unlink()
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ModelError, match="locked cannot be read: Permission denied; check who may"):
        resolve_model(str(folder))


def test_revision_in_the_reference(tmp_path, monkeypatch):
    hub = FakeHub(monkeypatch, make_model(tmp_path / "snapshot"))
    resolve_model("hf://org/name@abc")
    assert hub.requested[0]["revision"] == "abc"
    with pytest.raises(ModelError, match="names revision abc, --revision v1"):
        resolve_model("hf://org/name@abc", revision="v1")


def test_a_local_folder_wins_over_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "org" / "name")
    hub = FakeHub(monkeypatch, tmp_path, fails=AssertionError("asked the hub"))
    assert resolve_model("org/name").path == Path("org/name")
    assert hub.requested == []


def test_a_repository_with_several_ggufs_asks_which(tmp_path, monkeypatch):
    (tmp_path / "snapshot").mkdir()
    FakeHub(monkeypatch, tmp_path / "snapshot", files=["a-Q4.gguf", "a-Q8.gguf", "README.md"])
    with pytest.raises(ModelError, match=r"hf://org/name/a-Q4.gguf, hf://org/name/a-Q8.gguf"):
        resolve_model("hf://org/name")


def test_the_only_gguf_of_a_repository_is_taken(tmp_path, monkeypatch):
    (tmp_path / "snapshot").mkdir()
    hub = FakeHub(monkeypatch, tmp_path / "snapshot", files=["a-Q4.gguf"])
    (tmp_path / "snapshot" / "a-Q4.gguf").write_bytes(b"no gguf but fetched")
    with pytest.raises(ModelError, match=r"a-Q4.gguf is not a usable GGUF file"):
        resolve_model("hf://org/name")
    assert hub.requested[-1]["filename"] == "a-Q4.gguf"


def test_a_repository_of_pickles_says_to_convert(tmp_path, monkeypatch):
    (tmp_path / "snapshot").mkdir()
    FakeHub(monkeypatch, tmp_path / "snapshot", files=["pytorch_model.bin"])
    with pytest.raises(ModelError, match="convert them to safetensors"):
        resolve_model("hf://org/name")


def answer(kind, status=404):
    request = httpx.Request("GET", "https://hub.test/org/name")
    return kind("no", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (lambda: answer(errors.GatedRepoError, 403), "accept its licence .* set HF_TOKEN"),
        (lambda: answer(errors.RepositoryNotFoundError), "not on the hub, or is private"),
        (lambda: answer(errors.RevisionNotFoundError), "has no revision v9"),
        (lambda: answer(errors.HfHubHTTPError, 401), "answers 401; set HF_TOKEN"),
        (lambda: answer(errors.HfHubHTTPError, 500), "the hub answers 500"),
        (lambda: errors.LocalEntryNotFoundError("x"), "HF_HUB_OFFLINE"),
        (lambda: errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE"),
        (lambda: OSError(28, "No space left on device"), "the disk is full"),
    ],
)
def test_what_the_hub_refuses_is_said_in_our_words(failure, message, tmp_path, monkeypatch):
    FakeHub(monkeypatch, tmp_path, fails=failure())
    with pytest.raises(ModelError, match=message):
        resolve_model("hf://org/name", revision="v9")


@pytest.mark.parametrize(
    "kind",
    [errors.RepositoryNotFoundError, errors.RevisionNotFoundError],
)
def test_what_does_not_exist_is_a_fault_of_the_settings(kind, tmp_path, monkeypatch):
    """Another try cannot help, as it can where the hub is out of reach."""
    FakeHub(monkeypatch, tmp_path, fails=answer(kind))
    with pytest.raises(NoSuchModel):
        resolve_model("hf://org/name", revision="v9")
    FakeHub(monkeypatch, tmp_path, fails=answer(errors.HfHubHTTPError, 500))
    with pytest.raises(ModelError) as caught:
        resolve_model("hf://org/name", revision="v9")
    assert not isinstance(caught.value, NoSuchModel)


def test_tokenizer_of_another_folder(tmp_path):
    files = resolve_model(str(make_model(tmp_path / "m")))
    other = make_model(tmp_path / "t", json.dumps({"model_type": "other"}))
    replaced = files.with_tokenizer(str(other))
    assert replaced.path == other
    assert replaced.config == files.config


def test_dummy_weights_are_a_function_of_seed_and_name(tmp_path):
    files = resolve_model(str(make_model(tmp_path / "m")))
    one = open_checkpoint(files, load_format="dummy", seed=3)
    other = DummyCheckpoint(3)
    other.read("z.weight", (5,))
    a, b = one.read("q.weight", (64, 64)), other.read("q.weight", (64, 64))
    assert a.dtype == "BF16"
    assert a.data.tolist() == b.data.tolist()
    assert DummyCheckpoint(4).read("q.weight", (64, 64)).data.tolist() != a.data.tolist()
    values = (a.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert 0.018 < values.std() < 0.022
    norm = one.read("model.norm.weight", (3,))
    assert norm.data.view(np.uint16).tolist() == [0x3F80] * 3
    assert one.read("q.bias", (2,)).data.tolist() == [0] * 4
    assert list(one.names()) == ["q.weight", "model.norm.weight", "q.bias"]
    assert one.total_bytes == 64 * 64 * 2 + 6 + 4
    with pytest.raises(ModelError, match="load format 'pt' does not fit"):
        open_checkpoint(files, load_format="pt")
