"""Images made of packages: what the Dockerfile says, what packages' scripts would have written."""

from __future__ import annotations

import io
import json
import py_compile
import re
import shlex
import sys
import tarfile
from pathlib import Path

import pytest

from images import debian, files
from images.archive import opened
from images.recipe import Recipe, recipe
from release import assembled, image_trial, wheels

DOCKERFILE = (assembled.ROOT / "Dockerfile").read_text()


def test_the_dockerfile_says_what_each_image_is():
    read = recipe(DOCKERFILE, "router", {"VERSION": "1.2.3"})
    assert read.base == "BASE"
    assert read.config["User"] == "65532:65532"
    assert read.config["Entrypoint"] == ["octavo", "router"]
    assert read.config["ExposedPorts"] == {"8080/tcp": {}}
    assert read.config["Env"][0].startswith("PATH=/opt/octavo/bin:/usr/local/sbin:")
    assert read.config["Labels"]["org.opencontainers.image.version"] == "1.2.3"
    assert read.config["Labels"]["org.opencontainers.image.title"] == "octavo/router"
    assert read.steps == [
        ["install", "/images/router.txt"],
        ["finish", "/dist", "--without", "octavo_operator", "octavo_engine/_native"],
    ]


def test_an_argument_adds_a_step():
    without = recipe(DOCKERFILE, "engine-cpu", {}).steps
    with_model = recipe(DOCKERFILE, "engine-cpu", {"DEMO_MODEL": "1"}).steps
    assert [step for step in with_model if step not in without] == [
        ["install", "/images/demo.txt", "--no-deps"]
    ]


def test_the_image_for_gpus_is_on_the_base_with_a_compiler():
    read = recipe(DOCKERFILE, "engine-cuda", {})
    assert read.base == "BUILD_BASE"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in read.config["Env"]
    assert read.steps[-1] == ["finish", "/dist", "--whole"]


@pytest.mark.parametrize("name", assembled.NAMES)
def test_every_step_is_one_that_files_knows(name: str):
    for words in recipe(DOCKERFILE, name, {"DEMO_MODEL": "1", "MEDIA": "1"}).steps:
        files.parser().parse_args(words)


def test_an_instruction_that_is_not_known_is_refused():
    text = "FROM ${BASE} AS x-files\nFROM ${BASE} AS x\nVOLUME /data\n"
    with pytest.raises(ValueError, match="does not know the Dockerfile's VOLUME"):
        recipe(text, "x", {})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("RUN touch /x", "does not know the Dockerfile's RUN"),
        ("COPY --from=x-files /opt/octavo /opt/octavo\nCOPY LICENSE /", "copies /opt/octavo of"),
        ("CMD --help", "does not know the Dockerfile's CMD"),
        ("", "copies /opt/octavo of"),
    ],
)
def test_what_would_be_missing_from_an_assembled_image_is_refused(line: str, what: str):
    text = f"FROM ${{BASE}} AS x-files\nFROM ${{BASE}} AS x\n{line}\n"
    with pytest.raises(ValueError, match=what):
        recipe(text, "x", {})


def test_a_command_that_only_a_builder_can_run_is_refused():
    copy = "COPY --from=x-files /opt/octavo /opt/octavo"
    text = f"FROM ${{BASE}} AS x-files\nRUN apt-get install gcc\nFROM ${{BASE}} AS x\n{copy}\n"
    with pytest.raises(ValueError, match="cannot run: apt-get install gcc"):
        recipe(text, "x", {})


def as_declared(name: str) -> dict[str, object]:
    """What the Dockerfile declares of an image, read line by line, each stage after its base."""
    logical = re.sub(r"(?m)^#.*\n", "", DOCKERFILE).replace("\\\n", " ")
    stages = {
        stage: (base, body)
        for base, stage, body in re.findall(
            r"FROM (\S+) AS (\S+)\n(.*?)(?=FROM |\Z)", logical, re.S
        )
    }
    base, body = stages[name]
    if base in stages:
        body = stages[base][1] + body
    body = body.replace("${VERSION}", "1.2.3").replace("${REVISION}", "").replace("${SOURCE}", "")
    body = body.replace("${PATH}", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")

    def last(instruction: str) -> str:
        return str(re.findall(rf"(?m)^{instruction} (.*\S)\s*$", body)[-1])

    def pairs(instruction: str) -> dict[str, str]:
        lines = re.findall(rf"(?m)^{instruction} (.*)$", body)
        return dict(word.split("=", 1) for word in shlex.split(" ".join(lines)))

    return {
        "Entrypoint": json.loads(last("ENTRYPOINT")),
        "User": last("USER"),
        "WorkingDir": last("WORKDIR"),
        "ExposedPorts": {f"{last('EXPOSE')}/tcp": {}},
        "Env": pairs("ENV"),
        "Labels": pairs("LABEL"),
    }


@pytest.mark.parametrize("name", assembled.NAMES)
def test_an_assembled_image_has_what_the_dockerfile_declares(name: str, tmp_path: Path):
    layer = tmp_path / "layer"
    with tarfile.open(layer, "w") as tar:
        tar.addfile(tarfile.TarInfo("opt/octavo/pyvenv.cfg"))
    read = recipe(DOCKERFILE, name, {"VERSION": "1.2.3", "DEMO_MODEL": "1"})
    assembled.write_archive(read, "x86_64", [layer], f"octavo/{name}:1.2.3", tmp_path / "tar")
    with opened(tmp_path / "tar") as image:
        config = dict(image.config)
    config["Env"] = dict(word.split("=", 1) for word in config["Env"])
    assert config == as_declared(name)


def test_a_later_variable_replaces_an_earlier_one():
    copy = "COPY --from=x-files /opt/octavo /opt/octavo"
    text = f"FROM ${{BASE}} AS x-files\nFROM ${{BASE}} AS x\nENV A=1 B=2\n{copy}\nENV A=3\n"
    assert recipe(text, "x", {}).config["Env"] == ["A=3", "B=2"]


def test_both_ways_leave_out_the_same_files():
    options = debian.dpkg_options()
    assert "--dpkgopt=path-exclude=/usr/share/man/*" in options
    assert not debian.is_wanted("/usr/share/man/man1/ls.1.gz")
    assert not debian.is_wanted("/usr/share/doc/bash/README.gz")
    assert debian.is_wanted("/usr/share/doc/bash/copyright")
    assert debian.is_wanted("/usr/bin/bash")


UNPACKED = {
    "./usr/share/base-passwd/passwd.master": b"root:x:0\n",
    "./usr/share/base-passwd/group.master": b"root:*:0\n",
    "./usr/share/libc-bin/nsswitch.conf": b"hosts: files dns\n",
    "./usr/share/ca-certificates/mozilla/B.crt": b"B\n",
    "./usr/share/ca-certificates/mozilla/A.crt": b"A\n",
    "./usr/share/man/man1/x.1": b"manual",
    "./etc/hostname": b"this machine",
    "./etc/resolv.conf": b"nameserver 192.0.2.1",
    "./etc/apt/sources.list": b"deb mirror",
    "./var/lib/dpkg/status": b"Package: usr-is-merged\n",
    "./var/lib/dpkg/status.d/bash": b"Package: bash\n",
}


def configured(unpacked: dict[str, bytes]) -> dict[str, bytes]:
    old, new = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=old, mode="w") as tar:
        for name, data in unpacked.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 123
            tar.addfile(info, io.BytesIO(data))
    old.seek(0)
    with tarfile.open(fileobj=old) as source, tarfile.open(fileobj=new, mode="w") as target:
        assembled.configure(source, target)
    new.seek(0)
    with tarfile.open(fileobj=new) as tar:
        assert {info.mtime for info in tar} == {0}
        return {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]


def test_the_base_has_what_the_packages_scripts_would_write():
    found = configured(UNPACKED)
    assert found["etc/passwd"] == b"root:x:0\n"
    assert found["etc/group"] == b"root:*:0\n"
    assert found["etc/nsswitch.conf"] == b"hosts: files dns\n"
    assert found["etc/ssl/certs/ca-certificates.crt"] == b"A\nB\n"
    assert found["etc/ca-certificates.conf"] == b"mozilla/A.crt\nmozilla/B.crt\n"


def test_the_base_has_nothing_of_the_machine_that_made_it():
    found = configured(UNPACKED)
    gone = ("etc/hostname", "etc/resolv.conf", "etc/apt/sources.list", "usr/share/man/man1/x.1")
    assert not [name for name in gone if name in found]
    packages = [name for name in found if name.startswith("var/lib/dpkg/")]
    assert packages == ["var/lib/dpkg/status.d/bash"], "what mmdebstrap pretends is not there"


def test_a_library_for_another_processor_is_refused(tmp_path: Path):
    header = b"\x7fELF\x02\x01" + bytes(12)
    (tmp_path / "right.so").write_bytes(header + (183).to_bytes(2, "little"))
    assembled.check_processor(tmp_path, "aarch64")
    (tmp_path / "wrong.so").write_bytes(header + (62).to_bytes(2, "little"))
    with pytest.raises(SystemExit, match=r"wrong\.so is not for aarch64"):
        assembled.check_processor(tmp_path, "aarch64")


def test_the_archive_is_read_as_docker_saves_it(tmp_path: Path):
    layers = []
    for number in range(2):
        layers.append(tmp_path / f"layer{number}")
        with tarfile.open(layers[-1], "w") as tar:
            info = tarfile.TarInfo(f"file{number}")
            tar.addfile(info)
    read = Recipe("BASE", {"User": "65532:65532"})
    archive = tmp_path / "image.tar"
    assembled.write_archive(read, "aarch64", layers, "docker.io/octavo/router:1", archive)
    with opened(archive) as image:
        assert set(image.files) == {"file0", "file1"}
        assert image.config["User"] == "65532:65532"
        assert image.tags == ["docker.io/octavo/router:1"]
    with tarfile.open(archive) as tar:
        config = json.load(tar.extractfile("config.json"))  # type: ignore[arg-type]
    assert (config["os"], config["architecture"]) == ("linux", "arm64")
    image_trial.unpack(archive, tmp_path / "root")
    assert {path.name for path in (tmp_path / "root").iterdir()} == {"file0", "file1"}


def test_wheels_of_older_platforms_will_do():
    found = wheels.platforms("aarch64", (2, 28))
    assert found[0] == "manylinux_2_28_aarch64"
    assert {"manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= set(found)
    assert "manylinux_2_29_aarch64" not in found


def test_another_python_says_why_it_makes_no_images(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    assert assembled.why_not() == "images have Python 3.11, whose bytecode only Python 3.11 writes"


def test_a_program_that_is_missing_says_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "install the Debian package mmdebstrap" in assembled.why_not()
    assert "install qemu-user-static" in image_trial.why_not("sparc")


def test_bytecode_that_needs_times_is_written_again(tmp_path: Path):
    """A read-only image with other times could not use it, and would compile at each start."""
    source = tmp_path / "module.py"
    source.write_text("A = 1\n")
    stale = Path(py_compile.compile(str(source), doraise=True) or "")
    assert stale.read_bytes()[4:8] == bytes(4)
    files.add_bytecode(tmp_path)
    assert int.from_bytes(stale.read_bytes()[4:8], "little") == 0b01
