"""The Debian packages that images are based on, where they are not based on one of a registry."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

SUITE: Final = "bookworm"
PYTHON: Final = (3, 11)  # the suite's
GLIBC: Final = (2, 36)  # likewise
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}  # also in OCI's words
# Stands for the Dockerfile's argument of that name, beside the essential packages.
PACKAGES: Final = {
    "BASE": ("python3", "ca-certificates", "libstdc++6"),
    "BUILD_BASE": ("python3", "python3-venv", "python3-dev", "ca-certificates", "g++"),
}
EXCLUDED: Final = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*",
                   "/usr/share/man/*")  # fmt: skip
KEPT: Final = "/usr/share/doc/*/copyright"
# For mmdebstrap: /usr is one from the start; the package that would merge it brings all of Perl.
MERGED_USR: Final = "/usr/share/mmdebstrap/hooks/merged-usr"


def dpkg_options() -> tuple[str, ...]:
    """For mmdebstrap where it installs packages."""
    rules = [f"path-exclude={pattern}" for pattern in EXCLUDED]
    return tuple(f"--dpkgopt={rule}" for rule in (*rules, f"path-include={KEPT}"))


def is_wanted(path: str) -> bool:
    """The same rules for an absolute path."""
    return fnmatchcase(path, KEPT) or not any(fnmatchcase(path, rule) for rule in EXCLUDED)
