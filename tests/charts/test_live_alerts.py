"""Each alert of the chart fires on its fault and clears after it: real faults, real processes, the
chart's own rules at another pace."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from charts.sources.alerts import ALERTS
from tests.charts.faults import (
    BESIDE_EACH_OTHER,
    EVERY,
    LAST,
    OF_A_ROUTER,
    OF_THE_OPERATOR,
    steady_load,
)
from tests.charts.live_stack import live_stack
from tests.fakes.chart import Chart, one
from tests.tools import prometheus as tools

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.charts.faults import Fault
    from tests.charts.live_stack import LiveStack
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.slow

LOOK_S = 0.5  # a dozen faults look at once
# As the rule sees it: of what there was at the first scrape it knows nothing.
USED_TO_HITS = 'increase(octavo_router_prefix_cached_tokens_total{pool="steady"}[1h]) > 40000'


def test_every_alert_has_a_fault():
    names = [name for fault in EVERY for name in fault.alerts]
    assert sorted(names) == sorted(alert.name for alert in ALERTS)


@pytest.mark.cluster
@pytest.mark.timeout(1200)  # of a machine that does much else; else a minute
def test_each_alert_fires_on_its_fault_and_clears(
    chart: Chart, apiserver: ApiServer, tmp_path: Path
):
    program = tools.tool("prometheus")
    if program is None:
        pytest.skip(tools.MISSING)
    rule = one(chart.objects({"alerts": {"enabled": True}}), "PrometheusRule", "octavo")
    asyncio.run(_live(program, tmp_path, apiserver, rule["spec"]))


async def _live(program: str, folder: Path, server: ApiServer, rules: dict[str, object]) -> None:
    async with live_stack(program, folder, server, rules) as stack, steady_load(stack):
        await _until(stack, "absent(ALERTS{alertstate='firing'})", "nothing fires")
        await _until(stack, USED_TO_HITS, "prompts are found in the cache")
        async with asyncio.TaskGroup() as tasks:
            for fault in BESIDE_EACH_OTHER:
                tasks.create_task(_one_by_one(stack, (fault,)))
            tasks.create_task(_one_by_one(stack, OF_A_ROUTER))
            tasks.create_task(_one_by_one(stack, OF_THE_OPERATOR))
        await _one_by_one(stack, LAST)


async def _one_by_one(stack: LiveStack, faults: Sequence[Fault]) -> None:
    for fault in faults:
        began_at = time.time()
        async with fault.lasts(stack):
            for name, labels in fault.alerts.items():
                # It counts if it fired between two looks, too.
                seconds = f"[{round(time.time() - began_at) + 1}s]"
                firing = f'ALERTS{{alertname="{name}", alertstate="firing", {labels}}}'
                await _until(stack, f"count_over_time({firing}{seconds})", f"{name} fires")
        for name, labels in fault.alerts.items():
            firing = f'ALERTS{{alertname="{name}", alertstate="firing", {labels}}}'
            await _until(stack, f"absent({firing})", f"{name} clears")


async def _until(stack: LiveStack, expr: str, what: str) -> None:
    end = time.monotonic() + stack.speed.limit_s
    while not await asyncio.to_thread(stack.prometheus.query, expr):
        if time.monotonic() > end:
            raise AssertionError(f"it did not come about that {what} ({stack.speed})")
        await asyncio.sleep(LOOK_S)  # another process
    print(f"{time.strftime('%X')} {what}")  # noqa: T201  # shown where the test fails
