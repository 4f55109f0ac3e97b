"""Named points at the boundaries of processes where a test makes one die or wait.

Off unless OCTAVO_FAILPOINTS is set when a process starts, to entries NAME=ACTION@COUNT between
semicolons: `core.outputs=kill@3;router.head=delay:0.5@1`. At the COUNT-th passage, once, the
process kills itself, or the thread sleeps for so many seconds and all of its work waits. Where
none is set, a point costs the look at one attribute:

    if failpoints.IS_ON:
        failpoints.hit("core.outputs")
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Final, NamedTuple

VARIABLE: Final = "OCTAVO_FAILPOINTS"
# Name, and what has just happened there. Those of the engine's core count in its own process.
POINTS: Final = {
    "core.commands": "the core has taken requests, and computed nothing of them",
    "core.outputs": "the core has computed a step, and said nothing of it",
    "core.sent": "the core has sent a step's tokens",
    "server.request": "the engine's server has a request, and has done nothing with it",
    "server.text": "a thread of the engine's server is about to read a long text",
    "server.events": "the engine's server is about to write events to a connection",
    "router.connected": "the router is about to send a request to an engine",
    "router.sent": "the router has sent a request to an engine",
    "router.head": "the router has the head of an engine's answer",
    "router.body": "the router has a part of an engine's answer, and has relayed nothing of it",
    "router.end": "the router has an engine's whole answer",
}
logger = logging.getLogger("octavo.failpoints")


class Failpoint(NamedTuple):
    """What happens at a point, and at which passage."""

    action: str
    seconds: float
    passage: int


def parse(text: str) -> dict[str, Failpoint]:
    """Raises ValueError that says what is wrong with an entry."""
    found = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        name, _, rest = entry.partition("=")
        action, _, count = rest.partition("@")
        action, _, seconds = action.partition(":")
        if name not in POINTS:
            raise ValueError(f"{VARIABLE}: {name!r} is no failpoint; there are {', '.join(POINTS)}")
        if action not in ("kill", "delay") or not (count or "1").isdigit():
            raise ValueError(
                f"{VARIABLE}: {entry!r} is not NAME=kill@COUNT or NAME=delay:SECONDS@COUNT"
            )
        found[name] = Failpoint(action, float(seconds or 0), int(count or 1))
    return found


_set = parse(os.environ.get(VARIABLE, ""))
_passed = dict.fromkeys(_set, 0)
_counting = threading.Lock()
IS_ON: Final = bool(_set)


def hit(name: str) -> None:
    """Does what is set for this passage."""
    point = _set.get(name)
    if point is None:
        return
    with _counting:
        _passed[name] += 1
        if _passed[name] != point.passage:
            return
    logger.warning("Reached a failpoint", extra={"failpoint": name, "action": point.action})
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(point.seconds)
