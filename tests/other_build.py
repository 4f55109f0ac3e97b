"""Puts another build's modules in place: `OCTAVO_BUILD=FOLDER pytest -p tests.other_build`.

For builds that are for tests alone, as of `make test-emulated`: what is installed stays as it is,
and processes that a test starts use it.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

MODULES = {"octavo_engine._native", "octavo_router._fast"}


class OtherBuild(MetaPathFinder):
    """Finds a compiled module in a build's folder before anyone else finds the installed one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        stem = self._folder / fullname.rpartition(".")[2]
        for suffix in EXTENSION_SUFFIXES:
            file = Path(f"{stem}{suffix}")
            if file.exists():
                return spec_from_file_location(fullname, file)
        return None  # a build need not have both


def _use(folder: Path) -> None:
    loaded = MODULES & sys.modules.keys()
    if loaded:
        raise RuntimeError(f"{loaded} were imported before tests.other_build")
    if not list(folder.glob("_*.so")):
        raise FileNotFoundError(f"OCTAVO_BUILD={folder} has no compiled module; build it first")
    sys.meta_path.insert(0, OtherBuild(folder))


_use(Path(os.environ["OCTAVO_BUILD"]).resolve())
