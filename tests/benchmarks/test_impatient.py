"""What is said of a load that was more than could be served; the load itself: the script."""

from __future__ import annotations

import asyncio

from benchmarks.router.impatient_clients import QUICK, Crowd, Ending, judge

PEAK = 8.0


def crowd(*endings: Ending) -> Crowd:
    return Crowd(port=0, story="deadline", endings=list(endings))


def whole(at_s: float) -> Ending:
    return Ending(at_s, at_s + 1.0, 200, is_whole=True, says_when=False)


def refused(at_s: float, took_s: float = 0.001) -> Ending:
    return Ending(at_s, at_s + took_s, 503, is_whole=False, says_when=True)


def well() -> list[Ending]:
    """All that can be served is, the rest is refused at once; then all is."""
    endings = [whole(i / PEAK) for i in range(int(QUICK.overload_s * PEAK))]
    endings += [refused(i / 16.0) for i in range(int(QUICK.overload_s * 16))]
    return endings + [whole(QUICK.overload_s + i / 4) for i in range(12)]


def test_who_serves_what_can_be_served_keeps_all_bounds():
    verdict = judge("it", crowd(*well()), PEAK, QUICK)
    assert not verdict.complaints
    assert verdict.seen["goodput of the peak"] >= 0.95


def test_work_for_nobody_is_told():
    late = [Ending(at.sent_s, at.sent_s + 9.0, 200, True, False) for at in well() if at.is_whole]
    verdict = judge("it", crowd(*late, refused(12.0)), PEAK, QUICK)
    assert any("goodput of the peak: 0," in complaint for complaint in verdict.complaints)


def test_refusals_that_come_late_or_last_are_told():
    verdict = judge("it", crowd(*well(), *[refused(12.0, 4.0)] * 9), PEAK, QUICK)
    assert any("p99 of a refusal" in complaint for complaint in verdict.complaints)
    verdict = judge("it", crowd(*well(), refused(QUICK.overload_s + 3.0)), PEAK, QUICK)
    assert any(
        "last refusal after the load fell, s: 3" in complaint for complaint in verdict.complaints
    )


def test_a_server_that_is_not_there_serves_nobody():
    absent = Crowd(port=9, story="leave")
    asyncio.run(absent.ask(1))
    assert [(one.status, one.is_good) for one in absent.endings] == [(0, False)]
