"""The API server is away for long, in the midst of a rollout: afterwards all ends as without that.

Ten minutes with OCTAVO_TEST_FULL=1, seconds otherwise. Red when: the operator gives up, asks an API
server that is away without pause, or does another thing afterwards.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.fakes.effort import is_full
from tests.fakes.fault_proxy import ApiCall, CutBefore, Fault, FaultProxy
from tests.fakes.live_operator import operator
from tests.fakes.operator_story import live_through, snapshot

if TYPE_CHECKING:
    from tests.fakes.apiserver import ApiServer

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

AWAY_S = 600.0 if is_full() else 12.0
BACK_WITHIN_S = 120.0
CALLS_A_SECOND = 20.0  # of one operator to a server that is away, over all of its watches


@pytest.mark.timeout(int(AWAY_S + 300))
def test_after_an_outage_everything_is_as_without_it(apiserver: ApiServer):
    async def undisturbed(namespace: str) -> object:
        async with operator(apiserver, namespace, lease=None, resync_s=1.0):
            await live_through(apiserver, namespace)
        return await asyncio.to_thread(snapshot, apiserver, namespace)

    async def away(namespace: str) -> object:
        went_at = 0.0
        num_meanwhile = num_writes = 0

        def on_call(call: ApiCall) -> Fault:
            nonlocal went_at, num_meanwhile, num_writes
            num_writes += call.is_write
            if not went_at and num_writes == 6:
                went_at = time.monotonic()
                proxy.cut_watches()
            if not went_at or time.monotonic() - went_at > AWAY_S:
                return None
            num_meanwhile += 1
            return CutBefore()

        async with FaultProxy(apiserver) as proxy:
            proxy.on_call = on_call
            async with operator(
                apiserver, namespace, config=proxy.config, lease=None, resync_s=1.0
            ) as found:
                await live_through(apiserver, namespace, within_s=AWAY_S + BACK_WITHIN_S)
                assert found.metrics.bugs == 0
        assert 0 < num_meanwhile <= CALLS_A_SECOND * AWAY_S
        return await asyncio.to_thread(snapshot, apiserver, namespace)

    async def both() -> tuple[object, object]:
        new = apiserver.make_namespace
        return await asyncio.gather(undisturbed(new()), away(new()))

    expected, ended = asyncio.run(both())
    assert ended == expected
