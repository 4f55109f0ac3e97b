"""`octavo status`: what `octavo up` runs on this machine, and its state."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser, not_negative
from octavo_engine.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.local.home import Home
    from octavo.local.snapshot import PlatformSnapshot

EXIT_NOT_RUNNING = 3
EXIT_NOT_READY = 4
_LOOK_S = 0.2


def main(prog: str, argv: Sequence[str]) -> int:
    from octavo.local.home import Home

    parser = CommandParser(prog, "Show what octavo up runs on this machine.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--wait", type=not_negative, default=None, metavar="N",
        help="wait up to N seconds until all models serve",
    )  # fmt: skip
    args = parser.parse_args(argv)
    home = Home.find(os.environ)
    deadline = time.monotonic() + (args.wait or 0)
    while True:
        owner, snapshot = home.owner(), _read(home)
        is_ready = owner is not None and snapshot is not None and snapshot.is_ready
        if is_ready or time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_S)
    if owner is None:
        print(
            f"{prog}: octavo up is not running ({home.path}); start it with octavo up",
            file=sys.stderr,
        )
        return EXIT_NOT_RUNNING
    if snapshot is None:
        raise OctavoError(f"{owner.text}, and has not written its state yet; try again")
    if args.json:
        print(snapshot.to_json())
    else:
        from rich.console import Console

        from octavo.local.screen import render

        Console().print(render(snapshot))
    return EXIT_NOT_READY if args.wait is not None and not is_ready else 0


def _read(home: Home) -> PlatformSnapshot | None:
    from octavo.local.snapshot import PlatformSnapshot

    try:
        return PlatformSnapshot.from_json(home.state_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
