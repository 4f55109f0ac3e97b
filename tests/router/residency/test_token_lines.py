"""Internal lines leave streams, and nothing else does; events are cut where they end."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.residency import native, token_lines

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'


def test_a_line_of_tokens_is_taken_out_and_read(hot_path):
    data = b": octavo 0 17,204,9\n" + EVENT + b": octavo 12 4294967295\n" + EVENT
    expected = (EVENT + EVENT, [(0, [17, 204, 9]), (12, [4294967295])], None)
    assert hot_path.split_token_lines(data) == expected


def test_an_event_may_bring_no_tokens(hot_path):
    assert hot_path.split_token_lines(b": octavo 3\n" + EVENT) == (EVENT, [(3, [])], None)


def test_the_beginning_is_told_apart(hot_path):
    data = b': octavo begin {"id": "x", "seed": 7}\n: octavo 0 1\n' + EVENT
    assert hot_path.split_token_lines(data) == (EVENT, [(0, [1])], b'{"id": "x", "seed": 7}')


def test_a_stream_without_our_lines_is_passed_on_as_it_is(hot_path):
    for data in (EVENT, b": comment\n\n", b"", b"data: : octavo 0 1\n\n", b":octavo 0 1\n\n"):
        clean, lines, begin = hot_path.split_token_lines(data)
        assert (clean, lines, begin) == (data, [], None)
        assert clean is data


def test_a_byte_order_mark_is_passed_on_and_hides_nothing_behind_its_line(hot_path):
    data = codecs.BOM_UTF8 + EVENT
    assert hot_path.split_token_lines(data) == (data, [], None)
    assert hot_path.split_token_lines(data + b": octavo 3 5\n" + EVENT) == (
        data + EVENT, [(3, [5])], None,
    )  # fmt: skip
    assert hot_path.find_event_end(data + EVENT[:-1]) == len(data)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_any_line_end_ends_our_lines(hot_path, end):
    data = b"data: a" + end + b": octavo 3 5" + end + b"data: b" + end + end
    assert hot_path.split_token_lines(data) == (
        b"data: a" + end + b"data: b" + end + end,
        [(3, [5])],
        None,
    )


def test_words_of_later_versions_do_not_reach_clients(hot_path):
    data = b": octavo news 1 2 3\n: octavo \n" + EVENT
    assert hot_path.split_token_lines(data) == (EVENT, [], None)


@pytest.mark.parametrize(
    "line",
    [b"0 ", b"0 1,", b"0 ,1", b"0 1 2", b"0 -1", b"0 4294967296", b"0  1", b"0 1x",
     b"1000000000 1", b"0 00000000001"],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_no_tokens(hot_path, line):
    with pytest.raises(ValueError, match=r"a token line cannot be read: .*: octavo"):
        hot_path.split_token_lines(b": octavo " + line + b"\n" + EVENT)


@pytest.mark.parametrize(
    ("buffer", "end"),
    [
        (b"", 0),
        (b"data: a", 0),
        (b"data: a\n", 0),
        (b"data: a\n\n", 9),
        (b"data: a\n\ndata: b\n", 9),
        (b"data: a\r\n\r\n", 11),
        (b"data: a\r\n", 0),
        (b"data: a\r\n\r", 10),
        (b"data: a\r\r", 9),
        (b"data: a\n\r\n", 10),
        (b"data: a\r\n\n", 10),
        (b"\n", 1),
        (b"\r\n", 2),
        (b"a\n\nb\n\nc", 6),
    ],
)
def test_an_empty_line_ends_an_event(hot_path, buffer, end):
    assert hot_path.find_event_end(buffer) == end
    assert hot_path.find_event_end(bytearray(buffer), 0) == end


def test_the_search_begins_where_it_is_told(hot_path):
    assert hot_path.find_event_end(b"a\n\nb\n\n", 3) == 6
    assert hot_path.find_event_end(b"a\n\nb\n", 3) == 3
    assert hot_path.find_event_end(b"a\n\nb", 4) == 4
    assert hot_path.find_event_end(b"", 7) == 7


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_cut_anywhere_all_events_come_through(hot_path, end):
    event = b"data: x" + end + b": y" + end + end
    stream = event * 5
    for cut in range(1, len(event) + 2):
        buffer, relayed = b"", []
        for at in range(0, len(stream), cut):
            buffer += stream[at : at + cut]
            ready = hot_path.find_event_end(buffer)
            relayed.append(buffer[:ready])
            buffer = buffer[ready:]
        assert b"".join(relayed) + buffer == stream
        assert buffer in (b"", b"\n")


PIECES = [
    b"\n",
    b"\r",
    b"\r\n",
    b": octavo ",
    b": octavo begin ",
    b"0 1,2",
    b"1 ",
    b"data: x",
    b",",
]
PIECES += [b"\xff", b"7", b" ", b":", b"begin", b"\x00"]


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.integers(0, 5))
def test_the_twins_agree(pieces, start):
    fast = native.load()
    data = b"".join(pieces)
    results: list[object] = []
    for split in (fast.split_token_lines, token_lines.split_token_lines):
        try:
            results.append(split(data))
        except ValueError:
            results.append("refused")
    assert results[0] == results[1]
    start = min(start, len(data))
    assert fast.find_event_end(data, start) == token_lines.find_event_end(data, start)
