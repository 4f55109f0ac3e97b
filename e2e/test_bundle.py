"""A bundle of the real images into Debian's registry, and into a containerd of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import yaml

from e2e.cluster import cache, images, packages
from e2e.cluster.choose import cluster
from images.archive import opened
from images.sbom import bill, file_name
from octavo.bundle.contents import of_kind, read
from tests.tools.build import tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SECONDS_TO_START = 60


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of images, chart, SBOMs and the demo model, as `octavo bundle create` makes it."""
    folder = tmp_path_factory.mktemp("bundle")
    archives = cluster().archives(images.NAMES)
    words = []
    for archive in archives:
        with opened(archive) as image:
            document = bill(image)
        path = folder / f"{file_name(document)}.cdx.json"
        path.write_text(json.dumps(document))
        words += [f"--image={archive}", f"--sbom={path}"]
    chart = cache.ROOT / "charts" / "octavo"
    subprocess.run([tool("helm"), "package", str(chart), f"--destination={folder}"], check=True)
    (packed,) = folder.glob("octavo-*.tgz")
    to = folder / "octavo.bundle"
    octavo("bundle", "create", *words, f"--chart={packed}", "--model=smollm2", f"--to={to}")
    return to


def octavo(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def await_true(condition: object, log: Path) -> None:
    assert callable(condition)
    until = time.monotonic() + SECONDS_TO_START
    while not condition():
        assert time.monotonic() < until, log.read_text()[-2000:]
        time.sleep(0.05)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of Debian's docker-registry."""
    packages.install_missing()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}
    config = {"version": 0.1, "storage": storage, "http": {"addr": host}}
    (tmp_path / "registry.yml").write_text(yaml.safe_dump(config))
    log = tmp_path / "registry.log"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://{host}/v2/", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    with running(["docker-registry", "serve", str(tmp_path / "registry.yml")], log):
        await_true(answers, log)
        yield host


@pytest.fixture
def containerd(tmp_path: Path) -> Iterator[str]:
    """The socket of one that has nothing."""
    packages.install_missing()
    socket_path = tmp_path / "containerd.sock"
    config = tmp_path / "containerd.toml"
    config.write_text(
        f'version = 2\nroot = "{tmp_path}/root"\nstate = "{tmp_path}/state"\n'
        f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{socket_path}"\n'
    )
    log = tmp_path / "containerd.log"
    ctr = ["ctr", f"--address={socket_path}", "version"]
    with running(["containerd", f"--config={config}"], log):
        await_true(
            lambda: subprocess.run(ctr, capture_output=True, check=False).returncode == 0, log
        )
        yield str(socket_path)


def test_a_registry_serves_what_the_bundle_has(bundle: Path, registry: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    said = octavo("bundle", "load", str(bundle), "--registry", registry, "--to", str(site))
    _, items = read(bundle)
    for item in items:
        if item.kind == "values":
            continue
        url = f"http://{registry}/v2/{item.repository}/manifests/{item.tag}"
        accept = {"accept": item.manifest.media_type}
        with urllib.request.urlopen(urllib.request.Request(url, headers=accept)) as answer:
            assert answer.headers["docker-content-digest"] == item.manifest.digest
    # The chart from the registry is the chart in the folder, and its pods are pinned.
    chart = f"oci://{registry}/octavo/charts/octavo"
    values = f"--values={site / 'values.yaml'}"
    helm = [tool("helm"), "template", "octavo", chart, "--plain-http", values]
    rendered = subprocess.run(helm, capture_output=True, text=True, check=True).stdout
    for image in of_kind(items, "image"):
        assert f"{registry}/{image.repository}@{image.manifest.digest}" in rendered
    (uri,) = (line.split()[1] for line in said.splitlines() if line.startswith("spec.model.uri"))
    octavo("fetch", uri, "--to", str(tmp_path / "model"))
    (model,) = of_kind(items, "model")
    for layer in model.layers:
        assert (tmp_path / "model" / model.title(layer)).stat().st_size == layer.size


def test_containerd_unpacks_what_the_bundle_has(
    bundle: Path, containerd: str, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    octavo("bundle", "load", str(bundle), "--containerd", containerd, "--to", str(site))
    ctr = ["ctr", f"--address={containerd}", "--namespace=k8s.io"]
    _, items = read(bundle)
    listed = subprocess.run([*ctr, "images", "check"], capture_output=True, text=True, check=True)
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()[1:]}
    for image in of_kind(items, "image"):
        for name in (f":{image.tag}", f"@{image.manifest.digest}"):
            line = lines[f"docker.io/{image.repository}{name}"]
            assert image.manifest.digest in line
            assert "complete" in line
            assert line.split()[-1] == "true", "it is unpacked: a pod starts at once"
    (model,) = of_kind(items, "model")
    for layer in model.layers:
        path = site / "models" / model.name / model.title(layer)
        assert path.stat().st_size == layer.size
