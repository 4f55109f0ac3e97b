"""Several pieces of work: all results in order, or the first error and nothing left running."""

from __future__ import annotations

import asyncio

import pytest

from octavo_engine.server.generation.gather import all_of


def test_results_come_in_the_order_of_the_work():
    async def late(number: int) -> int:
        for _ in range(3 - number):
            await asyncio.sleep(0)
        return number

    assert asyncio.run(all_of(late(number) for number in range(3))) == [0, 1, 2]


def test_the_first_error_ends_the_others():
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    async def broken() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(all_of([forever(), broken()]))
    assert ended == ["forever"]
