"""Whether the system may write a crashed process's memory to disk."""

from __future__ import annotations

import os
import resource

ALLOW = "OCTAVO_CORE_DUMPS"  # set to 1 to look into a crash


def forbid_core_dumps() -> None:
    """Neither of this process nor of those that it starts: prompts and keys are in their memory."""
    if os.environ.get(ALLOW) != "1":
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
