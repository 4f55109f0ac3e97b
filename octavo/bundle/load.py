"""Brings a bundle to its site: a registry, containerd, or the nodes of a cluster of kind."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bundle.contents import of_kind, values_for
from octavo.bundle.errors import BundleError
from octavo.bundle.layout import image_tar
from octavo.fetch.errors import of_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo.bundle.contents import Item
    from octavo.bundle.layout import LayoutReader
    from octavo.bundle.registry import RegistryClient

SOCKET = "/run/containerd/containerd.sock"
_IMAGES_ARE_THERE: Mapping[str, Any] = {"images": {"registry": "", "pullPolicy": "Never"}}


@dataclass(frozen=True, slots=True)
class LoadedBundle:
    """What the reader of the last lines has to know."""

    chart: Path
    values: Path
    models: tuple[str, ...]  # their URIs, or where their files are


def into_registry(
    reader: LayoutReader, items: Sequence[Item], registry: RegistryClient, to: Path,
    on_item: Callable[[str], object],
) -> LoadedBundle:  # fmt: skip
    """Pushes all there is but the values, each under its tag and its digest."""
    for item in items:
        if item.kind == "values":
            continue
        sent = 0
        for part in item.parts:
            if registry.push_blob(item.repository, part, reader.blob(part)):
                sent += part.size
        for image in item.images:  # before the index that names them
            if image != item.manifest:
                body = reader.blob(image).whole()
                registry.push_manifest(item.repository, image.digest, image, body)
        body = reader.blob(item.manifest).whole()
        registry.push_manifest(item.repository, item.tag, item.manifest, body)
        on_item(
            f"{registry.place}/{item.repository}:{item.tag}@{item.manifest.digest} "
            f"({sent / 1e6:,.1f} of {item.size / 1e6:,.1f} MB sent)"
        )
    models = tuple(
        f"oci://{registry.place}/{model.repository}@{model.manifest.digest}"
        for model in of_kind(items, "model")
    )
    values = {"global": {"imageRegistry": registry.place}}
    return _write_files(reader, items, to, values, models)


def into_containerd(
    reader: LayoutReader, items: Sequence[Item], nodes: Mapping[str, Sequence[str]], to: Path,
    on_item: Callable[[str], object],
) -> LoadedBundle:  # fmt: skip
    """Imports all images at each node, by name and by digest, and writes the models' files.

    `nodes`: name → the command that runs `ctr` there.
    """
    for node, ctr in nodes.items():
        for image in of_kind(items, "image"):
            name = f"docker.io/{image.repository}"
            _pipe(
                [*ctr, "images", "import", "-"],
                image_tar(reader, image.manifest, f"{name}:{image.tag}"),
            )
            pinned = f"{name}@{image.manifest.digest}"
            _output([*ctr, "images", "tag", "--force", f"{name}:{image.tag}", pinned])
            _check(ctr, pinned, image.manifest.digest, node)
            on_item(f"{node}: {name}:{image.tag}@{image.manifest.digest}")
    models = []
    for model in of_kind(items, "model"):
        folder = to / "models" / model.name
        _write_model(reader, model, folder)
        models.append(str(folder))
    return _write_files(reader, items, to, _IMAGES_ARE_THERE, tuple(models))


def containerd_here(socket: str) -> dict[str, list[str]]:
    """This machine as a node."""
    if shutil.which("ctr") is None:
        raise BundleError("ctr is missing; it comes with containerd: run this on the node itself")
    return {"containerd": ["ctr", f"--address={socket}", "--namespace=k8s.io"]}


def kind_nodes(cluster: str, environ: Mapping[str, str] = os.environ) -> dict[str, list[str]]:
    """Those of a cluster of kind."""
    provider = environ.get("KIND_EXPERIMENTAL_PROVIDER") or "docker"
    for program in ("kind", provider):
        if shutil.which(program) is None:
            raise BundleError(f"{program} is missing, which --kind needs; install it")
    names = _output(["kind", "get", "nodes", f"--name={cluster}"]).split()
    if not names:
        raise BundleError(f"there is no cluster {cluster}; kind get clusters lists what there is")
    ctr = ["ctr", "--namespace=k8s.io"]
    return {name: [provider, "exec", "--interactive", name, *ctr] for name in names}


def _check(ctr: Sequence[str], name: str, digest: str, node: str) -> None:
    lines = _output([*ctr, "images", "list", f"name=={name}"]).splitlines()
    if not any(line.split()[:1] == [name] and digest in line.split()[1:] for line in lines):
        raise BundleError(f"{node} does not have {name} after the import; see containerd's log")


def _write_files(
    reader: LayoutReader, items: Sequence[Item], to: Path, place: Mapping[str, Any],
    models: tuple[str, ...],
) -> LoadedBundle:  # fmt: skip
    (chart,) = of_kind(items, "chart")
    try:
        to.mkdir(parents=True, exist_ok=True)
        archive = to / chart.title(chart.layers[0])
        archive.write_bytes(reader.blob(chart.layers[0]).whole())
        values = to / "values.yaml"
        values.write_text(values_for(reader, items, place))
        for bill in of_kind(items, "sbom"):
            path = to / "sbom" / bill.title(bill.layers[0])
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(reader.blob(bill.layers[0]).whole())
    except OSError as error:
        raise of_disk(error, to) from None
    return LoadedBundle(archive, values, models)


def _write_model(reader: LayoutReader, model: Item, folder: Path) -> None:
    """Whole or not at all: an older folder of that name is replaced."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model.name}-") as temporary:
            files = Path(temporary) / "files"
            for layer in model.layers:
                path = files / model.title(layer)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.writelines(reader.blob(layer))
            if folder.exists():
                folder.rename(Path(temporary) / "old")
            files.rename(folder)
    except OSError as error:
        raise of_disk(error, folder.parent) from None


def _pipe(command: Sequence[str], blocks: Any) -> None:
    """Raises BundleError with the program's last line."""
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said
        ) as process:
            assert process.stdin is not None
            try:
                with process.stdin as pipe:
                    for block in blocks:
                        pipe.write(block)
            except BrokenPipeError:
                pass  # it has ended, and says why
        if process.returncode:
            said.seek(0)
            raise _failed(command, said.read().decode(errors="replace"))


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failed(command, done.stderr or done.stdout)
    return done.stdout


def _failed(command: Sequence[str], said: str) -> BundleError:
    reason = (said.strip().splitlines() or ["it says nothing"])[-1][:500]
    return BundleError(f"{' '.join(command)} failed: {reason}")
