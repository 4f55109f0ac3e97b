"""What every picture needs before it is drawn: matplotlib, and a name that says what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

ENDINGS = (".png", ".svg", ".pdf")


def require(path: Path) -> Any:
    """Matplotlib's figure module, before minutes of work. Raises ConfigError: what is missing."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"--plot must end in {', '.join(ENDINGS)}; got {path.name}")
    try:
        from matplotlib import figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    return figure
