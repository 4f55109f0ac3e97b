"""How a run begins: collected without a look for garbage, in an order that shares what is dear.

A worker is given an equal part of the tests, in their order, and one that has nothing left takes
from the end of another's queue. So what a queue begins with stays with its worker, and is started
once in the whole run.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from _pytest.fixtures import FixtureDef

# Triton settles when it is first imported, by whomever, what its kernels run in.
if not any(Path(place).exists() for place in ("/proc/driver/nvidia", "/dev/nvidiactl")):
    os.environ["TRITON_INTERPRET"] = "1"

T = TypeVar("T")
DEAR = ("apiserver", "platform", "prometheus")  # fixtures: processes that stay up
SLOW = {*DEAR, "chart", "helm", "envoy"}  # fixtures: what is built or started takes long


def pytest_configure() -> None:
    """A shell has Ctrl-C ignored by what it runs in the background, which any event loop that
    ends would undo."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Millions of objects that all stay: looking through them again and again takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """The inner ring, `make test`, leaves out what needs a build or a cluster's API, too."""
    if item.get_closest_marker("cluster") or SLOW & set(getattr(item, "fixturenames", ())):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    shared: dict[FixtureDef[object], list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        dear = _dear_fixture(item)
        (others if dear is None else shared.setdefault(dear, [])).append(item)
    items[:] = queues(list(shared.values()), others, workers)


def _dear_fixture(item: pytest.Item) -> FixtureDef[object] | None:
    known = getattr(item, "_fixtureinfo", None)
    names = [name for name in DEAR if known is not None and name in known.names_closure]
    return known.name2fixturedefs[names[0]][-1] if known is not None and names else None


def queues(groups: Iterable[list[T]], others: list[T], workers: int) -> list[T]:
    """All of them, so that each of the equal parts begins with whole groups."""
    heads: list[list[T]] = [[] for _ in range(workers)]
    for number, group in enumerate(groups):
        heads[number % workers] += group
    left = sum(map(len, heads)) + len(others)
    ordered: list[T] = []
    for number, head in enumerate(heads):
        size = left // (workers - number)  # as xdist cuts them
        num_others = max(size - len(head), 0)
        ordered += head + others[:num_others]
        others = others[num_others:]
        left -= len(head) + num_others
    return ordered + others


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """A test that leaves Ctrl-C's handler changed takes it from whoever runs the tests."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    assert after == before, "the test leaves a signal's handler changed"
