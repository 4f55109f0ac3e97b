"""Whether the compiled part is there, and what to do when it is not."""

from __future__ import annotations

from importlib import import_module

from octavo_engine.errors import ExtensionMissing


def require_extension() -> None:
    """Raises ExtensionMissing, which is a ConfigError and an ImportError."""
    try:
        import_module("octavo_engine._native")
    except ImportError as error:
        raise ExtensionMissing(
            "the compiled extension octavo_engine._native is missing or cannot be loaded "
            f"({error}); build it with `pip install .` in the source tree, which needs a C++20 "
            "compiler such as g++ 11 or clang++ 14 (--device sim works without it)"
        ) from error
