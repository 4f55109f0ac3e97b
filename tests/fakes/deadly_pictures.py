"""Files that a decoder dies of, or never ends with. Workers import it: their memory is limited."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from octavo_engine.core.media.prepare_sound import prepare_media

if TYPE_CHECKING:
    from octavo_engine.core.media.prepare import PreparationResult
    from octavo_engine.core.media.spec import MediaSpec

DEADLY, ENDLESS = b"deadly", b"endless"


def prepare(data: bytes, spec: MediaSpec) -> PreparationResult:
    """In a worker."""
    if data == DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    if data == ENDLESS:
        time.sleep(600)
    return prepare_media(data, spec)
