"""Small images, a chart and SBOMs, as the build writes them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "0.1.0"


def tar_of(files: dict[str, bytes], path: Path | None = None, mode: str = "w") -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw.getvalue())
    return raw.getvalue()


def docker_archive(
    path: Path,
    name: str,
    *,
    user: str = "65532:65532",
    wrong: bool = False,
    architecture: str = "amd64",
) -> Path:
    """As `docker save` writes an image of two layers; the first is the same in all images."""
    base = tar_of({"etc/base": architecture.encode() * 1000})
    own = tar_of({"opt/octavo/name": f"{name} {architecture}".encode()})
    ids = [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in (base, own)]
    if wrong:
        ids[1] = f"sha256:{'0' * 64}"
    config = {
        "architecture": architecture, "os": "linux",
        "config": {"User": user, "Labels": {"org.opencontainers.image.version": VERSION}},
        "rootfs": {"type": "layers", "diff_ids": ids},
    }  # fmt: skip
    manifest = [{"Config": "c.json", "RepoTags": [name], "Layers": ["0.tar", "1.tar"]}]
    tar_of(
        {
            "manifest.json": json.dumps(manifest).encode(),
            "c.json": json.dumps(config).encode(),
            "0.tar": base,
            "1.tar": own,
        },
        path,
    )
    return path


def last_layer(archive: Path) -> str:
    """Its digest, unpacked."""
    with tarfile.open(archive) as tar:
        config = tar.extractfile("c.json")
        assert config is not None
        digest: str = json.load(config)["rootfs"]["diff_ids"][-1]
    return digest


def release(folder: Path, architectures: tuple[str, ...] = ("",)) -> Path:
    """What `make release` leaves, as far as a bundle takes it."""
    for name in ("engine-cpu", "router", "operator"):
        for architecture in architectures:
            called = f"{name}-linux-{architecture}" if architecture else name
            archive = docker_archive(
                folder / "images" / f"{called}.tar",
                f"docker.io/octavo/{name}:e2e",
                architecture=architecture or "amd64",
            )
            component = {
                "type": "container", "name": f"octavo/{name}", "version": VERSION,
                "bom-ref": last_layer(archive),
            }  # fmt: skip
            bill = {"bomFormat": "CycloneDX", "metadata": {"component": component}}
            path = folder / "sbom" / f"{called}.cdx.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({**bill, "components": []}))
    metadata = f"apiVersion: v2\nname: octavo\nversion: {VERSION}\nappVersion: {VERSION}\n"
    chart = {"octavo/Chart.yaml": metadata.encode(), "octavo/values.yaml": b"{}\n"}
    tar_of(chart, folder / f"octavo-{VERSION}.tgz", "w:gz")
    return folder
