"""One request's prompts take a share of the engine, whatever else it asks for."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from octavo_engine.server.generation.prompt_share import PromptShare

if TYPE_CHECKING:
    from octavo_engine.server.service import Service


def make_service(rows: int = 16) -> Any:
    config = SimpleNamespace(max_num_seqs=rows)
    admission = SimpleNamespace(in_flight=1)
    return SimpleNamespace(admission=admission, engine=SimpleNamespace(config=config))


class Rig:
    """Prompts that end when they are told to."""

    def __init__(self, service: Any, width: int = 1) -> None:
        self.share = PromptShare(cast("Service", service), width)
        self.running: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}

    def start(self, count: int) -> list[asyncio.Task[int]]:
        return [asyncio.create_task(self.share.of(partial(self.prompt, i))) for i in range(count)]

    async def prompt(self, number: int) -> int:
        gate = self.gates[number] = asyncio.Event()
        self.running.append(number)
        try:
            await gate.wait()
        finally:
            self.running.remove(number)
        return number


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("width", "alone", "beside"), [(1, 14, 8), (3, 4, 2), (64, 1, 1)])
def test_some_rows_are_left_to_others_and_half_once_they_are_there(width, alone, beside):
    async def story() -> None:
        service = make_service()
        rig = Rig(service, width)
        tasks = rig.start(40)
        await settled()
        assert rig.running == list(range(alone))
        service.admission.in_flight = 2
        for number in list(rig.running):
            rig.gates[number].set()
            await settled()
        assert len(rig.running) == beside
        while rig.running:
            rig.gates[rig.running[0]].set()
            await settled()
        assert [await task for task in tasks] == list(range(40))

    asyncio.run(story())


def test_a_turn_that_nobody_takes_goes_to_the_next():
    async def story() -> None:
        rig = Rig(make_service(rows=1))
        first, second, third = rig.start(3)
        await settled()
        rig.gates[0].set()
        await first
        second.cancel()  # as its turn has come
        await settled()
        third_runs = rig.running == [2]
        for task in (second, third):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert third_runs and not rig.running

    asyncio.run(story())
