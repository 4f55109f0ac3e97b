"""Short names and pulled models in the settings of an engine: both mean files on this machine."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo.models.catalogue import find_model, unknown_name
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.config import EngineConfig

# NAME or NAME:SIZE; what ends in a file's suffix is a path.
_SHORT: Final = re.compile(r"(?!.*\.(?:gguf|json|bin|pt|pth|ckpt)$)\w[\w.-]*(?::[\w.-]+)?")


def with_local_files(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """The same model where it lies, under the name that was given. Paths stay as they are, and so
    does a hub's model that was never pulled."""
    if config.device == "sim" or config.revision is not None or _exists(config.model):
        return config
    entry = find_model(config.model)
    if entry is None and not _is_of_hub(config.model):
        return config
    from octavo.local.home import Home
    from octavo.models.library import ModelLibrary, parse_model_name

    name = parse_model_name(config.model)
    stored = ModelLibrary(Home.find(environ)).find(name)
    if entry is None and stored is None:
        return config
    is_demo = name.uri.startswith("demo://")
    path = name.uri if stored is None or is_demo else str(stored.path)
    return replace(config, model=path, served_model_names=config.names)


def check_short_name(config: EngineConfig) -> None:
    """Raises ConfigError for a name that is no model's, with what is near."""
    if config.device != "sim" and _SHORT.fullmatch(config.model) and not _exists(config.model):
        raise ConfigError(f"{unknown_name(config.model)} a file or folder here nor ORG/NAME")


def _is_of_hub(reference: str) -> bool:
    from octavo_engine.weights.hub import is_repository

    return is_repository(reference.removeprefix("hf://"))


def _exists(reference: str) -> bool:
    try:
        return Path(reference).expanduser().exists()
    except OSError:
        return False
