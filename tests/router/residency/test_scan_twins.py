"""The compiled scanner and its slow twin find the same; and both agree with the engine's reader."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.errors import RequestError
from octavo_engine.server.http import strict_json
from octavo_router.residency import native
from octavo_router.residency import scan as slow
from octavo_router.residency.api import CHAT, COMPLETION, OTHER, ScanError
from tests.router.residency.bodies import ADAPTERS, KINDS, Bodies, outcome

ENGINE_DEPTH = 64
# What the engine may yet take and a router does not: each a clean refusal, none of any use.
STRICTER = (
    "half a surrogate pair",
    "nested deeper",
    "a number that is too large",
    "a number of too many digits",
    "must be a JSON object",
    "expected a value",  # NaN and Infinity inside of lists
)


@pytest.fixture(scope="module")
def fast():
    return native.load()


@pytest.mark.parametrize("seed", range(3))
def test_the_twins_agree_on_whole_bodies(fast, seed):
    bodies = Bodies(seed)
    for _ in range(300):
        body = bodies.body()
        for kind in KINDS:
            expected = outcome(slow.scan, body, kind, ADAPTERS)
            assert outcome(fast.scan, body, kind, ADAPTERS) == expected != ("refused",), body


@pytest.mark.parametrize("seed", range(3))
def test_the_twins_agree_on_broken_bodies(fast, seed):
    bodies = Bodies(100 + seed)
    num_refused = 0
    for _ in range(700):
        body = bodies.broken()
        for kind in KINDS:
            expected = outcome(slow.scan, body, kind)
            assert outcome(fast.scan, body, kind) == expected, body
            num_refused += expected == ("refused",)
    assert len(KINDS) * 150 < num_refused < len(KINDS) * 650  # both happen


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary(max_size=30))
def test_the_twins_agree_on_any_bytes(noise):
    fast = native.load()
    for body in (noise, b'{"prompt":"' + noise + b'"}', b'{"prompt":' + noise + b"}"):
        assert outcome(fast.scan, body, COMPLETION) == outcome(slow.scan, body, COMPLETION)


def test_utf8_is_what_python_takes_for_it(fast):
    """All leads, with the second bytes at which the rules change."""
    for lead in range(0x80, 0x100):
        for second in (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0):
            for size in range(1, 5):
                text = bytes([lead, second, 0x80, 0xBF])[:size]
                for body in (b'{"prompt":"%s"}' % text, b'{"%s":"a"}' % text):
                    expected = outcome(slow.scan, body, COMPLETION)
                    assert outcome(fast.scan, body, COMPLETION) == expected, body


NUMBERS = [b"0", b"-0", b"-0.0", b"1", b"1.0", b"1e0", b"1E+00", b"0.1", b"100000.0", b"1e5"]
NUMBERS += [b"5e-324", b"1e-400", b"1.7976931348623157e308", b"9007199254740993", b"-12e-1"]
NUMBERS += [
    b"0.30000000000000004",
    b"123456789012345678901234567890",
    b"1" * 400,
    b"0." + b"3" * 400,
]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_twins_read_the_same_number(fast, number):
    for body in (
        b'{"messages":[],"tools":[%s]}' % number,
        b'{"messages":[{"role":"user","name":%s}],"n":%s}' % (number, number),
    ):
        expected = outcome(slow.scan, body, CHAT)
        assert outcome(fast.scan, body, CHAT) == expected != ("refused",)
    assert outcome(fast.scan, b'{"prompt":[%s,1]}' % number, COMPLETION) == outcome(
        slow.scan, b'{"prompt":[%s,1]}' % number, COMPLETION
    )


@pytest.mark.slow
def test_whatever_the_router_reads_the_engine_reads(fast):
    random = Bodies(7)
    bodies = [random.broken() for _ in range(2500)] + [b'{"model":"m","x":[1e999]}']
    num_stricter = 0
    for body in bodies:
        try:
            strict_json.parse(body, max_depth=ENGINE_DEPTH)
            engine_reads = True
        except RequestError:
            engine_reads = False
        try:
            fast.scan(body, CHAT)
        except ScanError as error:
            if engine_reads:
                num_stricter += 1
                assert any(reason in error.message for reason in STRICTER), (error, body)
        else:
            assert engine_reads, body
    assert num_stricter > 0


def test_a_scan_tells_the_place_of_a_mistake_as_the_twin_does(fast):
    """Not always the same byte, for what was expected can be told at different ones, but near."""
    bodies = Bodies(11)
    distances = []
    for _ in range(800):
        body = bodies.broken()
        try:
            fast.scan(body, OTHER)
        except ScanError as error:
            assert 0 <= error.offset <= len(body)
            with pytest.raises(ScanError) as expected:
                slow.scan(body, OTHER)
            if "not valid JSON" in expected.value.message and "UTF-8" not in str(expected.value):
                distances.append(abs(error.offset - expected.value.offset))
    near = sum(distance <= 1 for distance in distances)
    assert near > 0.6 * len(distances) > 60
