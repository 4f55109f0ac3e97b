"""The image that every pod starts from: one static program in an archive, made by no builder."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING

from e2e.cluster import cache, node_program

if TYPE_CHECKING:
    from pathlib import Path

IMAGE = "registry.k8s.io/pause:3.10"
_USER = "65535:65535"


def archive() -> Path:
    """As `docker save` writes one."""
    program = node_program.built() / "pause"
    path = program.with_suffix(".tar")
    with cache.locked("pause"):
        if not path.exists():
            unfinished = path.with_suffix(".new")
            _write(unfinished, program.read_bytes())
            unfinished.rename(path)
    return path


def _write(path: Path, program: bytes) -> None:
    layer = _tar({"pause": program}, mode=0o755)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"User": _USER, "Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    files = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer,
        "manifest.json": json.dumps(manifest).encode(),
    }
    path.write_bytes(_tar(files, mode=0o644))


def _tar(files: dict[str, bytes], *, mode: int) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content))
    return written.getvalue()
