"""A bundle comes into registries and nodes as it is, or not at all."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from octavo import cli
from octavo.bundle.contents import of_kind, read
from octavo.fetch.fetch import FetchRequest, fetch
from octavo.fetch.progress import FetchProgress
from tests.fakes import images
from tests.fakes.image_registry import ImageRegistry, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WEIGHTS = bytes(range(256)) * 5000


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(WEIGHTS)
    release = images.release(tmp_path / "release")
    to = tmp_path / "octavo.bundle"
    argv = ["--release", str(release), "--model", f"tiny={model}", "--to", str(to)]
    assert cli.main(["bundle", "create", *argv]) == 0
    return to


@pytest.fixture
def registry() -> Iterator[ImageRegistry]:
    with serving(ImageRegistry()) as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.bundle.registry.PAUSE_S", 0.0)


def load(bundle: Path, tmp_path: Path, *place: str) -> int:
    return cli.main(["bundle", "load", str(bundle), *place, "--to", str(tmp_path / "site")])


@pytest.mark.parametrize("wants", ["", "basic", "bearer"])
def test_a_registry_has_everything_by_its_digest(
    bundle: Path, registry: ImageRegistry, tmp_path: Path, monkeypatch, wants: str
):
    registry.wants = wants
    if wants:
        monkeypatch.setenv("OCI_USERNAME", "user")
        monkeypatch.setenv("OCI_PASSWORD", "pass")
    assert load(bundle, tmp_path, "--registry", f"{registry.host}/team") == 0
    reader, items = read(bundle)
    for item in items:
        if item.kind == "values":
            continue
        repository = f"team/{item.repository}"
        body = reader.blob(item.manifest).whole()
        assert registry.manifests[repository, item.tag] == body
        for part in item.parts:
            assert registry.blobs[repository, part.digest] == reader.blob(part).whole()


def test_what_the_registry_has_is_not_sent_again(
    bundle: Path, registry: ImageRegistry, tmp_path: Path
):
    assert load(bundle, tmp_path, "--registry", registry.host) == 0
    uploads = [line for line in registry.log if line.startswith("PUT") and "uploads" in line]
    _, items = read(bundle)
    blobs = {part.digest for item in items if item.kind != "values" for part in item.parts}
    assert len(uploads) == len(blobs), "a layer of several images is sent once, and mounted"
    registry.log.clear()
    assert load(bundle, tmp_path, "--registry", registry.host) == 0
    assert not [line for line in registry.log if "uploads" in line]


def test_values_and_chart_are_written_for_the_registry(
    bundle: Path, registry: ImageRegistry, tmp_path: Path, capsys
):
    assert load(bundle, tmp_path, "--registry", registry.host) == 0
    values = yaml.safe_load((tmp_path / "site" / "values.yaml").read_text())
    assert values["global"] == {"imageRegistry": registry.host}
    _, items = read(bundle)
    digests = {item.repository: item.manifest.digest for item in of_kind(items, "image")}
    assert values["operator"]["image"]["digest"] == digests["octavo/operator"]
    assert values["engines"]["cpu"]["image"]["digest"] == digests["octavo/engine-cpu"]
    chart = tmp_path / "site" / "octavo-0.1.0.tgz"
    assert chart.read_bytes() == (tmp_path / "release" / "octavo-0.1.0.tgz").read_bytes()
    assert len(list((tmp_path / "site" / "sbom").iterdir())) == 3
    assert f"--values {tmp_path / 'site' / 'values.yaml'}" in capsys.readouterr().out


def test_models_are_fetched_from_where_the_last_lines_say(
    bundle: Path, registry: ImageRegistry, tmp_path: Path, capsys
):
    assert load(bundle, tmp_path, "--registry", registry.host) == 0
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("spec.model.uri: ")
    ]
    uri = line.removeprefix("spec.model.uri: ")
    assert uri.startswith(f"oci://{registry.host}/octavo/models/tiny@sha256:")
    to = tmp_path / "fetched"
    with FetchProgress(uri) as progress:
        fetch(FetchRequest(uri=uri, folder=to), progress)
    assert (to / "model.safetensors").read_bytes() == WEIGHTS


def test_an_upload_that_breaks_off_is_sent_again(
    bundle: Path, registry: ImageRegistry, tmp_path: Path
):
    registry.failures = 3
    assert load(bundle, tmp_path, "--registry", registry.host) == 0


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"failures": 99}, "answers 503; try again later"),
        ({"alters_manifests": True}, "it alters manifests"),
        ({"wants": "basic"}, "set OCI_USERNAME and OCI_PASSWORD"),
    ],
)
def test_a_registry_that_fails_is_one_sentence(bundle: Path, tmp_path: Path, capsys, fault, text):
    with serving(ImageRegistry(**fault)) as registry:
        assert load(bundle, tmp_path, "--registry", registry.host) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "site").exists(), "else it would look installed"


def test_nothing_is_sent_of_an_altered_bundle(
    bundle: Path, registry: ImageRegistry, tmp_path: Path, capsys
):
    data = bytearray(bundle.read_bytes())
    place = data.index(WEIGHTS[:512])
    data[place] ^= 1
    bundle.write_bytes(data)
    assert load(bundle, tmp_path, "--registry", registry.host) == 1
    assert "is altered; copy it again" in capsys.readouterr().err
    assert registry.log == []


@pytest.mark.parametrize("place", ["", "http://host", "a b", "host/UPPER", "host:port"])
def test_what_is_no_registry_is_named(bundle: Path, tmp_path: Path, capsys, place: str):
    assert load(bundle, tmp_path, "--registry", place) != 0
    assert "it must be HOST:PORT or HOST/PATH" in capsys.readouterr().err


# What stands in for `ctr` and `docker`: it writes down what it was called with, and what came in.
PROGRAM = f"""#!{sys.executable}
import hashlib, json, os, sys
words = sys.argv[1:]
data = sys.stdin.buffer.read() if words[-3:] == ["images", "import", "-"] else b""
with open(os.environ["CALLS"], "a") as calls:
    digest = hashlib.sha256(data).hexdigest()
    print(json.dumps([os.path.basename(sys.argv[0]), *words, len(data)]), file=calls)
if words[:2] == ["get", "nodes"]:
    print(os.environ["NODES"])
if "list" in words:
    name = words[-1].removeprefix("name==")
    print("REF TYPE DIGEST")
    print(name, "application/vnd.oci.image.manifest.v1+json", name.partition("@")[2])
if os.environ.get("FAILS") in words:
    sys.exit("ctr: rpc error: it is full")
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ctr", "docker", "kind"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("NODES", "one-control-plane one-worker")
    return tmp_path / "calls"


def calls(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_containerd_has_each_image_by_name_and_by_digest(
    bundle: Path, tmp_path: Path, programs: Path, capsys
):
    assert load(bundle, tmp_path, "--containerd") == 0
    _, items = read(bundle)
    found = calls(programs)
    start = ["ctr", "--address=/run/containerd/containerd.sock", "--namespace=k8s.io", "images"]
    assert all(call[:4] == start for call in found)
    for image in of_kind(items, "image"):
        name = f"docker.io/{image.repository}"
        pinned = f"{name}@{image.manifest.digest}"
        assert ["tag", "--force", f"{name}:0.1.0", pinned, 0] in [call[4:] for call in found]
    assert sum(call[4] == "import" and call[-1] > 2000 for call in found) == 3
    values = yaml.safe_load((tmp_path / "site" / "values.yaml").read_text())
    assert values["images"] == {"registry": "", "pullPolicy": "Never"}
    model = tmp_path / "site" / "models" / "tiny"
    assert (model / "model.safetensors").read_bytes() == WEIGHTS
    assert f"Copy {model} to a volume" in capsys.readouterr().out


def test_a_node_that_fails_is_named_with_its_reason(
    bundle: Path, tmp_path: Path, programs: Path, monkeypatch, capsys
):
    monkeypatch.setenv("FAILS", "import")
    assert load(bundle, tmp_path, "--containerd") == 1
    assert "images import - failed: ctr: rpc error: it is full" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


@pytest.mark.slow
def test_kind_has_them_at_each_node(bundle: Path, tmp_path: Path, programs: Path):
    assert load(bundle, tmp_path, "--kind", "one") == 0
    found = calls(programs)
    assert found[0][:4] == ["kind", "get", "nodes", "--name=one"]
    imports = [call[:6] for call in found if "import" in call]
    for node in ("one-control-plane", "one-worker"):
        start = ["docker", "exec", "--interactive", node, "ctr", "--namespace=k8s.io"]
        assert imports.count(start) == 3


def test_a_cluster_that_is_not_there_is_named(
    bundle: Path, tmp_path: Path, programs: Path, monkeypatch, capsys
):
    monkeypatch.setenv("NODES", "")
    assert load(bundle, tmp_path, "--kind", "one") == 1
    assert "there is no cluster one" in capsys.readouterr().err


def test_programs_that_are_missing_are_named(bundle: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load(bundle, tmp_path, "--containerd") == 1
    assert "ctr is missing" in capsys.readouterr().err
    assert load(bundle, tmp_path, "--kind") == 1
    assert "kind is missing, which --kind needs" in capsys.readouterr().err


def test_a_place_is_required(bundle: Path, tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        load(bundle, tmp_path)
    assert "--registry --containerd --kind is required" in capsys.readouterr().err
