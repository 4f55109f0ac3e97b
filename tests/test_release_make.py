"""`make release`: each part is checked after it was made, and a fault in one ends it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from octavo.bundle.blobs import REFERENCE
from octavo.bundle.errors import BundleError
from octavo.bundle.layout import LayoutReader
from release import assembled, checksums, emulated, make, wheels
from tests.fakes import images
from tests.tools import build as tools_build


@pytest.fixture
def plan(tmp_path: Path) -> make.Plan:
    to = tmp_path / "release"
    to.mkdir()
    return make.Plan(to, images.VERSION)


def write_images(plan: make.Plan, folder: Path) -> dict[str, Path]:
    """Their layouts, by name and architecture."""
    return {
        f"{name} {architecture}": make.write_image(
            plan, name,
            images.docker_archive(
                folder / "image.tar", f"docker.io/octavo/{name}:e2e", architecture=architecture
            ),
        )
        for name in ("router", "operator")
        for architecture in ("amd64", "arm64")
    }  # fmt: skip


def test_images_are_layouts_with_the_name_of_the_release(plan: make.Plan, tmp_path: Path):
    made = write_images(plan, tmp_path)
    files = sorted(path.name for path in (plan.to / "images").iterdir())
    assert files == [
        "octavo-operator-0.1.0-linux-amd64.oci.tar", "octavo-operator-0.1.0-linux-arm64.oci.tar",
        "octavo-router-0.1.0-linux-amd64.oci.tar", "octavo-router-0.1.0-linux-arm64.oci.tar",
    ]  # fmt: skip
    (image,) = LayoutReader(made["router arm64"]).manifests
    assert image.platform == {"os": "linux", "architecture": "arm64"}
    assert image.annotations[REFERENCE] == "octavo/router:0.1.0"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp")], "no scratch"


def test_each_image_has_an_sbom_of_its_name(plan: make.Plan, tmp_path: Path):
    write_images(plan, tmp_path)
    sbom = plan.to / "sbom" / "router-linux-arm64.cdx.json"
    component = json.loads(sbom.read_text())["metadata"]
    assert component["component"]["name"] == "octavo/router"
    assert component["component"]["version"] == images.VERSION


def test_an_image_with_an_altered_layer_is_refused(plan: make.Plan, tmp_path: Path):
    path = write_images(plan, tmp_path)["router amd64"]
    reader = LayoutReader(path)
    layer = reader.blob(reader.parts(reader.manifests[0])[1])
    data = bytearray(path.read_bytes())
    data[layer.offset + layer.size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="is altered"):
        make.check_image(path, images.VERSION)


def test_an_image_of_another_version_or_user_is_refused(plan: make.Plan, tmp_path: Path):
    path = write_images(plan, tmp_path)["router amd64"]
    with pytest.raises(SystemExit, match=r"has the version 0\.1\.0, not 0\.2\.0"):
        make.check_image(path, "0.2.0")
    images.docker_archive(tmp_path / "root.tar", "docker.io/octavo/router:e2e", user="")
    with pytest.raises(SystemExit, match="runs as root"):
        make.write_image(plan, "router", tmp_path / "root.tar")


@pytest.fixture
def helm() -> None:
    if reason := tools_build.why_not():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("helm")
def test_the_chart_is_the_same_bytes_again_and_uses_each_digest(plan: make.Plan, tmp_path: Path):
    write_images(plan, tmp_path)
    make.make_chart(plan)
    chart = plan.to / "octavo-0.1.0.tgz"
    first = chart.read_bytes()
    make.make_chart(plan)
    assert chart.read_bytes() == first
    with tarfile.open(chart) as tar:
        names = tar.getnames()
        assert {info.mtime for info in tar} == {0}
    assert {"octavo/Chart.yaml", "octavo/values.schema.json"} <= set(names)


@pytest.mark.slow
@pytest.mark.usefixtures("helm")
def test_a_chart_with_a_fault_is_refused(plan: make.Plan, tmp_path: Path):
    write_images(plan, tmp_path)
    make.make_chart(plan)
    chart = plan.to / "octavo-0.1.0.tgz"
    target = io.BytesIO()
    with tarfile.open(chart) as old, tarfile.open(fileobj=target, mode="w:gz") as new:
        for info in old:
            data = old.extractfile(info).read()  # type: ignore[union-attr]
            if info.name.endswith("operator/deployment.yaml"):
                data = re.sub(rb"image: .*\n", b"image: octavo/operator:latest\n", data)
                info.size = len(data)
            new.addfile(info, io.BytesIO(data))
    chart.write_bytes(target.getvalue())
    archive = plan.to / "images" / "octavo-operator-0.1.0-linux-amd64.oci.tar"
    with pytest.raises(SystemExit, match="does not use the digest of octavo/operator"):
        make.check_chart(chart, [archive])
    chart.write_bytes(gzip.compress(b"no chart"))
    with pytest.raises(SystemExit, match="helm lint failed"):
        make.check_chart(chart, [archive])


@pytest.mark.slow
def test_the_sdist_has_the_sources_and_nothing_that_was_built(tmp_path: Path):
    command = [sys.executable, "-c", make.SDIST, str(tmp_path)]
    subprocess.run(command, check=True, cwd=make.ROOT, capture_output=True)
    (sdist,) = tmp_path.glob("octavo-*.tar.gz")
    make.check_sdist(sdist)
    with tarfile.open(sdist) as tar:
        names = tar.getnames()
    assert not [name for name in names if "/build/" in name or "/.venv/" in name]


@pytest.mark.parametrize(
    ("extra", "text"),
    [({"csrc/CMakeLists.txt": b""}, "lacks LICENSE"), ({"x/_native.so": b""}, "lacks LICENSE")],
)
def test_an_sdist_without_sources_is_refused(tmp_path: Path, extra: dict[str, bytes], text: str):
    path = tmp_path / "octavo-0.1.0.tar.gz"
    images.tar_of({f"octavo-0.1.0/{name}": data for name, data in extra.items()}, path, "w:gz")
    with pytest.raises(SystemExit, match=text):
        make.check_sdist(path)


def test_an_sdist_with_a_built_module_is_refused(tmp_path: Path):
    names = ("pyproject.toml", "LICENSE", "README.md", "csrc/CMakeLists.txt", "octavo/cli.py")
    files = {f"octavo-0.1.0/{name}": b"" for name in (*names, "engine/_native.so")}
    path = tmp_path / "octavo-0.1.0.tar.gz"
    images.tar_of(files, path, "w:gz")
    with pytest.raises(SystemExit, match=r"engine/_native\.so, which is built"):
        make.check_sdist(path)


def test_the_sums_are_signed_with_a_key_that_is_made_once(plan: make.Plan, tmp_path: Path, capsys):
    (plan.to / "octavo.whl").write_bytes(b"wheel")
    key = tmp_path / "release.key"
    make.finish(plan, key)
    assert "Keep it away from the artefacts" in capsys.readouterr().out
    before = key.read_bytes()
    make.finish(plan, key)
    assert (key.read_bytes(), capsys.readouterr().out) == (before, "")
    assert checksums.problems(plan.to, tmp_path / "release.key.pub") == []


def test_a_wheel_that_cannot_be_emulated_says_why(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(emulated, "PYTHON", sys.version_info[:2])
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = "qemu-aarch64-static and mmdebstrap missing; install qemu-user-static and mmdebstrap"
    assert emulated.why_not("aarch64") == reason
    monkeypatch.setattr(emulated, "PYTHON", (3, 0))
    assert "has another Python than 3." in emulated.why_not("aarch64")


@pytest.mark.parametrize(("minor", "is_old_enough"), [(17, True), (28, True), (31, False)])
def test_a_wheel_that_needs_a_newer_glibc_is_refused(minor: int, is_old_enough: bool):
    wheel = Path(f"octavo-0.1.0-cp311-cp311-manylinux_2_{minor}_aarch64.whl")
    target = wheels.TARGETS["aarch64"]
    if is_old_enough:
        wheels.check_platform(wheel, target)
        return
    with pytest.raises(SystemExit, match="needs a newer glibc than manylinux_2_28_aarch64"):
        wheels.check_platform(wheel, target)


def test_make_installs_the_same_tools_for_wheels_and_for_a_release():
    makefile = (make.ROOT / "Makefile").read_text()
    assert re.search(r"^release: .*\.installed release-tools", makefile, re.MULTILINE)
    assert re.search(r"^wheels: .* release-tools", makefile, re.MULTILINE)


def test_images_that_do_not_fit_are_refused_before_anything_is_made(
    plan: make.Plan, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(assembled, "why_not", lambda: "")
    assert make.why_no_images(plan, 24 * 10**9) == ""
    reason = make.why_no_images(plan, 12 * 10**9)
    assert "engine-cuda, router, operator need 24 GB of free disk" in reason
    assert "where 12 GB are free" in reason
    assert "--image engine-cpu router operator" in reason
    small = dataclasses.replace(plan, images=("router", "operator"))
    assert make.why_no_images(small, 12 * 10**9) == ""
    monkeypatch.setattr(assembled, "why_not", lambda: "mmdebstrap is missing")
    assert make.why_no_images(small, 12 * 10**9) == "mmdebstrap is missing"


def test_a_step_that_fails_tells_how_to_go_on(
    plan: make.Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(plan: make.Plan) -> None:
        raise SystemExit("the layers are not those of the configuration")

    monkeypatch.setattr(make, "STEPS", {"wheels": lambda plan: None, "images": fail})
    with pytest.raises(SystemExit, match="the layers"):
        make.make(plan, ["wheels", "images", "chart"])
    error = capsys.readouterr().err
    assert f"What was made stays in {plan.to}" in error
    assert "make release RELEASE_ARGS='--only images chart'" in error
    assert make.make(plan, ["wheels"]).keys() == {"wheels"}


def test_a_command_that_fails_is_named_without_a_traceback(
    plan: make.Plan, monkeypatch: pytest.MonkeyPatch
):
    run = lambda plan: subprocess.run(["sh", "-c", "exit 3"], check=True)  # noqa: E731
    monkeypatch.setattr(make, "STEPS", {"wheels": run})
    with pytest.raises(SystemExit, match="it ended with status 3: sh -c 'exit 3'"):
        make.make(plan, ["wheels"])


def test_what_is_missing_is_named_before_wheels_are_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(make, "why_no_images", lambda plan, free: "mmdebstrap is missing")
    monkeypatch.setattr(make, "why_no_chart", lambda: "no helm: install Go")
    monkeypatch.setattr(make, "make", lambda plan, steps: pytest.fail("it began"))
    with pytest.raises(SystemExit, match="cannot be made here: images: mmdebstrap is missing; "
                                         "chart: no helm: install Go"):  # fmt: skip
        make.main(["--only", "wheels", "images", "chart"])
