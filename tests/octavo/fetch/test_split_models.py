"""A model in several GGUF files: from every source all of its parts, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo.fetch.errors import FetchReason
from octavo.local.documents import deployment_of_model
from tests.fakes.model_store import Store, serving
from tests.octavo.fetch import test_sources as sources
from tests.octavo.fetch.test_sources import KEY, refused, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARTS = {f"m-0000{number}-of-00003.gguf": b"GGUF%d" % number * 500 for number in (1, 2, 3)}
FIRST, SECOND, THIRD = PARTS


@pytest.fixture
def store() -> Iterator[Store]:
    with serving(Store()) as store:
        yield store


def published(store: Store, source: str, folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    """The environment that finds the files at a source."""
    sources.FILES.clear()
    sources.FILES.update(files)
    match source:
        case "hub":
            sources.hub(store)
            return {"HF_ENDPOINT": store.url}
        case "s3":
            sources.s3(store)
            return {"AWS_ENDPOINT_URL": store.url, **KEY}
        case "gcs":
            sources.gcs(store)
            return {"STORAGE_EMULATOR_HOST": store.url}
        case "oci":
            sources.oci(store)
        case "web":
            store.files |= {f"/models/{name}": content for name, content in files.items()}
        case "folder":
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
    return {}


@pytest.fixture(autouse=True)
def _own_files(monkeypatch):
    monkeypatch.setattr(sources, "FILES", {})
    monkeypatch.setattr(sources, "NOISE", {"README.md": b""})


def uri(store: Store, source: str, folder: Path, name: str = "") -> str:
    base = {
        "hub": "hf://org/name",
        "s3": "s3://bucket/models/tiny",
        "gcs": "gs://bucket/tiny",
        "oci": f"oci://{store.url.removeprefix('http://')}/org/m:v1",
        "web": f"{store.url}/models",
        "folder": f"file://{folder}",
    }[source]
    return f"{base}/{name}" if name else base


@pytest.mark.parametrize("source", ["hub", "s3", "gcs", "oci", "folder"])
def test_the_only_model_is_fetched_with_all_its_parts(store, tmp_path, source):
    environ = published(store, source, tmp_path / "from", PARTS)
    mark = run(uri(store, source, tmp_path / "from"), tmp_path / "to", environ)

    assert [file.name for file in mark.files] == list(PARTS)
    assert all((tmp_path / "to" / name).read_bytes() == PARTS[name] for name in PARTS)


@pytest.mark.parametrize("source", ["hub", "s3", "gcs", "web", "folder"])
@pytest.mark.parametrize("name", [FIRST, THIRD])
def test_any_part_brings_the_others(store, tmp_path, source, name):
    environ = published(store, source, tmp_path / "from", PARTS | {"m.gguf": b"another"})
    mark = run(uri(store, source, tmp_path / "from", name), tmp_path / "to", environ)

    assert [file.name for file in mark.files] == list(PARTS)


@pytest.mark.parametrize("source", ["hub", "s3", "gcs", "oci", "web", "folder"])
def test_a_part_that_is_not_published_is_named(store, tmp_path, source):
    files = {name: content for name, content in PARTS.items() if name != SECOND}
    environ = published(store, source, tmp_path / "from", files)
    name = "" if source == "oci" else FIRST
    error = refused(uri(store, source, tmp_path / "from", name), tmp_path / "to", environ)

    assert error.reason is FetchReason.NOT_FOUND
    assert SECOND in str(error)
    if source != "web":  # which lists nothing
        assert "is missing from" in str(error) and "split into 3 files" in str(error)


def test_models_beside_it_are_counted_once(store, tmp_path):
    environ = published(store, "hub", tmp_path, PARTS | {"n.gguf": b"another"})
    error = refused("hf://org/name", tmp_path / "to", environ)
    assert f"name one of them in the URI: {FIRST}, n.gguf" in str(error)


def test_a_served_name_has_no_number(tmp_path):
    for name in PARTS:
        (tmp_path / name).write_bytes(b"")
    deployment = deployment_of_model(str(tmp_path / SECOND), replicas=1, device="cpu")
    assert (deployment.name, deployment.model.served_name) == ("m", "m")
