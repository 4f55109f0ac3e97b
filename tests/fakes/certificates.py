"""A certificate of its own authority, for servers of tests."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_certificate(folder: Path, address: str) -> Path:
    """For an IP address; the key lies beside it, ending in .key."""
    certificate = folder / "server.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate),
        "-subj", "/CN=test", "-days", "30", "-addext", f"subjectAltName=IP:{address}",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return certificate


def make_authority(folder: Path) -> None:
    """`ca.pem`, and signed by it `server.pem` and `client.pem`, each with its .key beside it."""
    folder.mkdir(exist_ok=True)

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    make = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(*make, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "30")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(*make, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-days", "30", "-CAcreateserial", "-out", f"{name}.pem", "-extfile", "names",
        )  # fmt: skip
