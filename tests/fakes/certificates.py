"""A certificate of its own authority, for servers of tests."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Of what signs others, and itself: Python 3.13 trusts no authority without it.
KEY_USAGE = "keyUsage=critical,digitalSignature,keyCertSign,cRLSign"
HERE = "DNS:localhost,IP:127.0.0.1"


def make_certificate(folder: Path, address: str) -> Path:
    """For an IP address; the key lies beside it, ending in .key."""
    certificate = folder / "server.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate),
        "-subj", "/CN=test", "-days", "30", "-addext", f"subjectAltName=IP:{address}",
        "-addext", KEY_USAGE,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return certificate


def make_authority(
    folder: Path, names: Sequence[str] = ("server", "client"), alternatives: str = HERE
) -> None:
    """`ca.pem`, and signed by it a NAME.pem for each name, each with its .key beside it.

    `alternatives`: their subjectAltName, in which {name} is the name.
    """
    folder.mkdir(exist_ok=True)

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    make = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *make, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "30",
        "-addext", KEY_USAGE,
    )  # fmt: skip
    for name in names:
        found = alternatives.format(name=name)
        (folder / "names").write_text(f"subjectAltName={found}\nauthorityKeyIdentifier=keyid")
        openssl(*make, "-keyout", f"{name}.key", "-out", "csr", "-subj", f"/CN={name[:60]}")
        openssl(
            "x509", "-req", "-in", "csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-days", "30", "-CAcreateserial", "-out", f"{name}.pem", "-extfile", "names",
        )  # fmt: skip
