"""From a file system with nothing but Debian to an answer, by README's lines and no others."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from e2e.cluster import cache, packages
from e2e.helm import fenced
from images import debian

if TYPE_CHECKING:
    from collections.abc import Iterator

BEFORE = "From a clone of this repository:"
ON_EVERY_MACHINE = "apt,ca-certificates,sudo"
# Where the machine at hand keeps what its network needs: names, authorities, proxies.
OF_THE_NETWORK = ("etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt")
MOST_SECONDS = 900  # on a busy machine; README says what it takes on an idle one


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Path]:
    """Its root. The clone is in /octavo."""
    if reason := packages.why_not():
        pytest.skip(reason)
    packages.install_missing()
    root = tmp_path / "root"
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=essential", f"--include={ON_EVERY_MACHINE}",
         f"--hook-dir={debian.MERGED_USR}", debian.SUITE, str(root)],
        check=True,
    )  # fmt: skip
    for name in OF_THE_NETWORK:
        if (Path("/") / name).exists():
            shutil.copyfile(Path("/") / name, root / name)
    clone = root / "octavo"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", cache.ROOT, clone], check=True)
    yield root
    shutil.rmtree(root)


@contextmanager
def typed(root: Path, command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in the clone, with processes and mounts of its own, which end with it."""
    mounts = (
        "mount -t proc proc $0/proc && mount --rbind /dev $0/dev && mount --bind /sys $0/sys && "
        'exec chroot $0 /bin/sh -ec "cd /octavo; $1"'
    )
    environment = {
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        **{name: os.environ[name] for name in ("http_proxy", "https_proxy") if name in os.environ},
        "DEBIAN_FRONTEND": "noninteractive",
        "HOME": "/root",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    own = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*own, "/bin/sh", "-ec", mounts, str(root), command],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def run(root: Path, command: str, log: Path) -> None:
    with typed(root, command, log) as process:
        assert process.wait(MOST_SECONDS) == 0, log.read_text(errors="replace")[-3000:]


@pytest.mark.timeout(3 * MOST_SECONDS)
def test_readme_leads_from_a_bare_file_system_to_an_answer(bare: Path, tmp_path: Path) -> None:
    install, demo = (
        line.partition(" #")[0] for line in fenced(cache.ROOT / "README.md", BEFORE)[:2]
    )
    assert shlex.split(install)[:3] == ["sudo", "apt-get", "install"]
    assert demo == "make demo"
    log = tmp_path / "log"
    began_at = time.monotonic()
    run(bare, "sudo apt-get update", log)  # as on every machine that was just made
    run(bare, install.replace("install", "install --yes"), log)
    installed_at = time.monotonic()
    with typed(bare, demo, log) as process:
        while "Paris" not in (said := log.read_text(errors="replace")):
            assert process.poll() is None, said[-3000:]
            assert time.monotonic() - installed_at < MOST_SECONDS, said[-3000:]
            time.sleep(0.1)
        answered_at = time.monotonic()
        assert "http://" in said  # where the console is
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    print(
        f"From a bare file system: packages {installed_at - began_at:.0f} s, "
        f"make demo to the answer {answered_at - installed_at:.0f} s"
    )
