"""The arena: values that live at the same time never share memory, and dead ones are reused."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.backends.native.fusion import fuse, settle_dtypes
from octavo_engine.backends.native.graph import Graph, Value, read, takes_over, written
from octavo_engine.backends.native.plan import ALIGNMENT, Lifetime, num_bytes, place, plan_memory
from octavo_engine.backends.native.recorder import Recorder
from tests.engine.backends.test_fusion import NORM, TABLE, block, linear

MAX_ROWS = {"T": 10, "S": 3}


@st.composite
def lifetimes(draw: st.DrawFn) -> Lifetime:
    first = draw(st.integers(0, 20))
    return Lifetime(draw(st.integers(1, 1000)), first, first + draw(st.integers(0, 8)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(lifetimes(), max_size=30))
def test_places_are_aligned_apart_and_within(items: list[Lifetime]) -> None:
    offsets, total = place(items)
    for i, one in enumerate(items):
        assert offsets[i] % ALIGNMENT == 0
        assert 0 <= offsets[i] <= total - one.num_bytes
        for j, other in enumerate(items[:i]):
            is_apart_in_time = one.first > other.last or other.first > one.last
            is_apart = (
                offsets[i] + one.num_bytes <= offsets[j]
                or offsets[j] + other.num_bytes <= offsets[i]
            )
            assert is_apart_in_time or is_apart
    assert total <= sum(-(-item.num_bytes // ALIGNMENT) * ALIGNMENT for item in items)


def test_memory_of_the_dead_goes_to_the_next() -> None:
    chain = [Lifetime(1000, i, i + 1) for i in range(10)]
    assert place(chain).num_bytes == 2 * 1024
    assert place([]).num_bytes == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_a_plan_never_overwrites_what_is_read_later(choices: list[tuple[int, int, int]]) -> None:
    """Any program, in a memory of tags: each read must find the value that it names."""
    ops = Recorder()
    values = [ops.embedding(TABLE)]
    for kind, first, second in choices:
        x, y = values[-1 - first % len(values)], values[-1 - second % len(values)]
        match kind:
            case 0:
                values.append(ops.rms_norm(x, NORM, 1e-5))
            case 1:
                values.append(ops.add(x, y))
            case 2:
                values.append(ops.add(x, ops.linear(y, linear(64))))
            case 3:
                values.append(ops.glu(ops.linear(x, linear(128)), "silu"))
            case 4:
                values.append(ops.rms_norm(ops.add(x, y), NORM, 1e-5))
    for result in (values[-1], values[0]):
        graph = Graph(tuple(ops.instructions), result)
        check_with_tags(settle_dtypes(graph, elide=False))
        check_with_tags(settle_dtypes(fuse(graph)))


def test_a_layer_reuses_its_memory() -> None:
    ops = Recorder()
    graph = settle_dtypes(
        fuse(Graph((), block(ops))._replace(instructions=tuple(ops.instructions)))
    )
    check_with_tags(graph)
    taken = sum(num_bytes(v, MAX_ROWS) for i in graph.instructions for v in written(i))
    assert plan_memory(graph, MAX_ROWS).num_bytes < taken / 2


def check_with_tags(graph: Graph) -> None:
    plan = plan_memory(graph, MAX_ROWS)
    memory: dict[int, object] = {}  # what lies in each 16 bytes

    def places(value: Value) -> range:
        start = plan.offsets[value]
        assert start % ALIGNMENT == 0
        assert start + num_bytes(value, MAX_ROWS) <= plan.num_bytes
        return range(start, start + num_bytes(value, MAX_ROWS), 16)

    for instruction in graph.instructions:
        inputs = {place for value in read(instruction) for place in places(value)}
        assert all(memory[place] == v for v in read(instruction) for place in places(v))
        taken = takes_over(instruction)
        for value in written(instruction):
            if taken is not None and value == taken[0]:
                assert plan.offsets[value] == plan.offsets[taken[1]]
            else:  # kernels write while they still read
                assert inputs.isdisjoint(places(value))
            memory.update((place, value) for place in places(value))
    assert all(memory[place] == graph.result for place in places(graph.result))
