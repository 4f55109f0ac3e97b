"""Octavo's images for the cluster: built by buildah from the project's Dockerfile, kept by content.

The base images come from Debian's archive, so no registry is used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster import cache, packages
from e2e.cluster.errors import ClusterError
from images import debian
from images.archive import opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NAMES = ("engine-cpu", "router", "operator")
# Stages that one story needs with an argument of its own: its mark `image` has them built.
VARIANTS = {"engine-cpu-media": ("engine-cpu", {"MEDIA": "1"})}
TAG = "e2e"
# What the Dockerfile copies; .dockerignore says the same.
_INPUTS = ("Dockerfile", ".dockerignore", "LICENSE", "README.md", "pyproject.toml")
_FOLDERS = ("common", "csrc", "engine", "images", "octavo", "operator", "router")
_LAYERS_LIMIT_GIB = 10


def reference(name: str) -> str:
    """As a pod names it."""
    return f"docker.io/octavo/{name}:{TAG}"


def build(names: Iterable[str]) -> list[Path]:
    """The images' archives; those whose sources are as they were are there already."""
    key = source_key()
    archives = {name: cache.folder() / f"image-{name}-{key}.tar" for name in names}
    if all(archive.exists() for archive in archives.values()):
        return list(archives.values())
    with _snapshot() as context, cache.locked("images"):
        packages.install_missing()
        _make_bases()
        for name, archive in archives.items():
            if not archive.exists():
                print(f"Building the image of {name}", file=sys.stderr)
                _build(name, context)
                _push(reference(name), archive)
                cache.forget_others(archive, f"image-{name}-*.tar")
        _forget_layers()
    return list(archives.values())


def wheel(to: Path) -> Path:
    """The wheel that these images are made of, in the folder `to`."""
    archive = to / "wheel.tar"
    with _snapshot() as context, cache.locked("images"):
        packages.install_missing()
        _make_bases()
        _build("wheel", context)
        file = to / "Containerfile"
        file.write_text(f"FROM scratch\nCOPY --from={reference('wheel')} /dist /dist\n")
        _buildah("bud", "--quiet", f"--file={file}", f"--tag={reference('dist')}", str(to))
        _push(reference("dist"), archive)
        _buildah("rmi", reference("dist"), reference("wheel"))
    with opened(archive) as image:
        (name,) = (name for name in image.files if name.endswith(".whl"))
        made = to / Path(name).name
        made.write_bytes(image.read(name))
    archive.unlink()
    return made


def source_key() -> str:
    """Of all that an image is made of."""
    return cache.key_of(_sources())


def _sources() -> list[Path]:
    files = [cache.ROOT / name for name in _INPUTS]
    for folder in _FOLDERS:
        for path in (cache.ROOT / folder).rglob("*"):
            is_made = "__pycache__" in path.parts or path.suffix in (".so", ".pyc")
            if path.is_file() and not is_made:
                files.append(path)
    return files


@contextmanager
def _snapshot() -> Iterator[Path]:
    """The sources as they are now, even if they are edited during the build."""
    with tempfile.TemporaryDirectory(dir=cache.folder()) as folder:
        for path in _sources():
            copy = Path(folder) / path.relative_to(cache.ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        yield Path(folder)


def _make_bases() -> None:
    for argument in debian.PACKAGES:
        image = _base(argument)
        if _buildah("images", "--quiet", "--filter", f"reference={image}"):
            continue
        print(f"Making {image} from Debian packages", file=sys.stderr)
        archive = cache.folder() / f"{argument.lower()}.tar"
        _run(["mmdebstrap", *_options(argument), debian.SUITE, str(archive)], epoch=0)
        container = _buildah("from", "scratch")
        _buildah("add", "--quiet", container, str(archive), "/")
        _buildah("commit", "--quiet", "--rm", container, image)
        archive.unlink()


def _options(argument: str) -> list[str]:
    return [
        *("--quiet", "--variant=essential", f"--include={','.join(debian.PACKAGES[argument])}"),
        *(f"--hook-dir={debian.MERGED_USR}", *debian.dpkg_options()),
    ]


def _base(argument: str) -> str:
    made_with = hashlib.sha256(" ".join(_options(argument)).encode()).hexdigest()[:8]
    return f"localhost/octavo-{argument.lower().replace('_', '-')}:{debian.SUITE}-{made_with}"


def stage(name: str) -> tuple[str, dict[str, str]]:
    """Of the Dockerfile, and what else than usual it is built with."""
    return VARIANTS.get(name, (name, {}))


def _build(name: str, context: Path) -> None:
    target, own = stage(name)
    arguments = {
        **{argument: _base(argument) for argument in debian.PACKAGES},
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        "DEMO_MODEL": "1",
        "SOURCE_DATE_EPOCH": "0",
        **own,
    }
    _buildah(
        *("bud", "--quiet", "--isolation=chroot", "--layers", "--format=docker"),
        *_trust_of_this_machine(),
        *(f"--build-arg={key}={value}" for key, value in arguments.items()),
        *(f"--target={target}", f"--tag={reference(name)}", str(context)),
    )


def _trust_of_this_machine() -> list[str]:
    """Where packages come through a proxy of one's own, its certificate is this machine's only."""
    return [
        f"--volume={path}:{path}:ro"
        for path in ("/etc/ssl/certs", "/etc/pip.conf")
        if Path(path).exists()
    ]


def _forget_layers() -> None:
    """Layers of earlier sources are kept to build the next image sooner, but not without bound."""
    used = _run(["du", "--summarize", "--block-size=1G", str(cache.folder() / "storage")])
    if int(used.split()[0]) > _LAYERS_LIMIT_GIB:
        _buildah("rmi", "--prune", "--force")


def _push(image: str, archive: Path) -> None:
    unfinished = archive.with_name(f"{archive.name}.new")
    unfinished.unlink(missing_ok=True)
    _buildah("push", "--quiet", image, f"docker-archive:{unfinished}:{image}")
    unfinished.rename(archive)


def _buildah(*arguments: str) -> str:
    """In a mount namespace of its own, so that no mount outlives it."""
    storage, state = cache.folder() / "storage", cache.folder() / "storage-state"
    places = [f"--root={storage}", f"--runroot={state}", "--storage-driver=overlay"]
    return _run(["unshare", "--mount", "nice", "buildah", *places, *arguments])


def _run(command: list[str], *, epoch: int | None = None) -> str:
    environment = dict(os.environ)
    if epoch is not None:
        environment["SOURCE_DATE_EPOCH"] = str(epoch)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-4000:]
        raise ClusterError(f"{' '.join(command)} failed:\n{said}")
    return done.stdout.strip()
