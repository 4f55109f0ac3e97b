"""What a virtual machine's host takes away: it says beside a figure how far it can be believed."""

from __future__ import annotations

from pathlib import Path

STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _STEAL, _GUEST = 3, 4, 7, 8  # user nice system idle iowait irq softirq steal guest…


class StealTime:
    """The share of wanted processor time that the hypervisor took, since this was made."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._before = _times(stat)

    def share(self) -> float | None:
        """Given to other machines instead; None where the system does not count it."""
        now = _times(self._stat)
        if self._before is None or now is None:
            return None
        spent = [after - before for before, after in zip(self._before, now, strict=True)]
        demanded = sum(spent) - spent[_IDLE] - spent[_IOWAIT]
        return spent[_STEAL] / demanded if demanded > 0 else 0.0


def describe(share: float | None) -> str:
    """A sentence; none where nothing is known, or next to nothing was taken."""
    if share is None or share < 0.005:
        return ""
    return f"The host gave {100 * share:.0f} % of the processor time to other machines meanwhile."


def _times(stat: Path) -> list[int] | None:
    try:
        kind, *ticks = stat.read_text().partition("\n")[0].split()
        times = [int(tick) for tick in ticks[:_GUEST]]  # guests count as users, too
    except (OSError, ValueError):
        return None
    return times if kind == "cpu" and len(times) == _GUEST else None
