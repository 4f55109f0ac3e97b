"""An engine core that misbehaves on command, run in place of the real one: magic prompt tokens."""

import os
import sys
import time
from pathlib import Path

from octavo_engine.backends.sim.backend import SimBackend
from octavo_engine.core.build import build_engine
from octavo_engine.core.process import wire
from octavo_engine.core.process.child import main
from octavo_engine.errors import ModelError

HANG, EXIT, NOISE, RAISE = 500, 501, 502, 503
MAX_FRAME = "OCTAVO_TEST_MAX_FRAME"  # of what it sends, once it has loaded
FAIL_IF_THERE = "OCTAVO_TEST_FAIL_IF_THERE"  # a file that makes loading fail


class FaultyBackend(SimBackend):
    """Reads its orders from the prompt."""

    def execute(self, step, sampling):
        tokens = set(step.token_ids.tolist())
        if HANG in tokens:
            time.sleep(3600)
        if EXIT in tokens:
            os._exit(7)
        if NOISE in tokens:
            os.write(int(sys.argv[sys.argv.index("--fd") + 1]), b"\xff" * 64)
        if RAISE in tokens:
            raise RuntimeError("the kernel said no")
        return super().execute(step, sampling)


def build(config, *, progress):
    progress(1, 2)
    path = os.environ.get(FAIL_IF_THERE)
    if path and Path(path).exists():
        raise ModelError("model.safetensors: truncated")
    wire.MAX_FRAME = int(os.environ.get(MAX_FRAME, wire.MAX_FRAME))
    return build_engine(config, progress=progress, backend=FaultyBackend(config))


if __name__ == "__main__":
    sys.exit(main(build=build))
