"""`octavo down`: end what `octavo up` runs on this machine, requests under way first."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser
from octavo_engine.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOOK_S = 0.1
_TWICE_S = 0.6  # signals that come closer together are taken for one


def main(prog: str, argv: Sequence[str]) -> int:
    from octavo.local.home import Home

    parser = CommandParser(prog, "Stop what octavo up runs on this machine.")
    parser.add_argument(
        "--now", action="store_true", help="stop at once, without waiting for requests to finish"
    )
    args = parser.parse_args(argv)
    home = Home.find(os.environ)
    owner = home.owner()
    if owner is None:
        print(f"{prog}: octavo up is not running ({home.path})", file=sys.stderr)
        return 0
    if not owner.pid:
        raise OctavoError("octavo up is still starting; try again")
    try:
        os.kill(owner.pid, signal.SIGTERM)
        if args.now:
            time.sleep(_TWICE_S)
            os.kill(owner.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has ended meanwhile
    except PermissionError:
        raise OctavoError(f"{owner.text}, which belongs to another user") from None
    while home.owner() is not None:
        time.sleep(_LOOK_S)
    print("stopped")
    return 0
