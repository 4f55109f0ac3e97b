"""Several routers that share nothing: one that is killed or rolled out costs the others nothing."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tests.fakes.router_process import streams
from tests.router.test_with_engines import all_whole, bodies, unbroken

if TYPE_CHECKING:
    from tests.fakes.router_process import StreamResult
    from tests.router.conftest import Platform

EACH = 9


def test_one_is_killed_and_the_others_are_replaced_under_load(platform: Platform):
    """None of the streams of two routers is lost, and none is longer at one engine."""
    wanted = bodies(2 * EACH, start=700)
    with ExitStack() as stack:
        killed, first, second = (stack.enter_context(platform.another_router()) for _ in range(3))

        def disturb() -> None:
            killed.process.kill()
            first.process.terminate()
            second.process.terminate()

        async def ask() -> list[StreamResult]:
            reported, others = await asyncio.gather(
                streams(first.port, wanted[:EACH], after=EACH, meanwhile=disturb),
                streams(second.port, wanted[EACH:], after=1, meanwhile=lambda: None),
            )
            return [*reported, *others]

        reported = asyncio.run(ask())
        assert (first.wait(), second.wait()) == (0, 0)
        assert len(first.access_lines) == len(second.access_lines) == EACH
        served = {line["endpoint"] for line in first.access_lines + second.access_lines}
        assert len(served) == len(platform.engines)
    all_whole(reported, unbroken(platform.engines[0].url, wanted))
