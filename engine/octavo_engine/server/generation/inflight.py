"""What is in flight, under every name that a client may use, so that it can be stopped."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    Stop = Callable[[], Awaitable[object]]


class InFlightRequests:
    """Belongs to the event loop. Several requests may share a client's name; all are stopped."""

    def __init__(self) -> None:
        self._stops: dict[str, list[Stop]] = {}

    def __len__(self) -> int:
        """Names, not requests."""
        return len(self._stops)

    @contextmanager
    def track(self, names: Iterable[str], stop: Stop) -> Iterator[None]:
        names = tuple(names)
        for name in names:
            self._stops.setdefault(name, []).append(stop)
        try:
            yield
        finally:
            for name in names:
                stops = self._stops[name]
                stops.remove(stop)
                if not stops:
                    del self._stops[name]

    async def stop_all(self) -> None:
        for name in list(self._stops):
            await self.stop(name)

    async def stop(self, name: str) -> int:
        """How many requests of that name were stopped."""
        stops = list(self._stops.get(name, ()))
        for stop in stops:
            await stop()
        return len(stops)


def names_of(request_id: str) -> tuple[str, str]:
    """The answer's id, such as "cmpl-7", and what its client called it."""
    return request_id, request_id.partition("-")[2]
