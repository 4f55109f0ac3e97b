"""Reads the JSON files that lie beside the weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 64 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the file; raises ModelError that names the file."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ModelError(f"{path} has {size} bytes; at most {MAX_BYTES} are read")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; it holds a {type(value).__name__}")
    return value
