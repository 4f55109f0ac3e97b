"""Forms are read the same however they are cut, and what is no form says why."""

from __future__ import annotations

import itertools

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.multipart import FormReader, PartBegan, boundary_of

CONTENT = b"\r\n--b\r\n--boundaries\r\n\x00\xff--\r\n--"  # nearly ends, again and again


def read(
    body: bytes, cuts: tuple[int, ...] = (), boundary: bytes = b"boundary"
) -> dict[str, bytes]:
    reader = FormReader(boundary)
    parts: dict[str, bytes] = {}
    name = ""
    places = [0, *sorted({cut % (len(body) + 1) for cut in cuts}), len(body)]
    for start, end in itertools.pairwise(places):
        for event in reader.feed(body[start:end]):
            if isinstance(event, PartBegan):
                name = event.name
                parts[name] = b""
            else:
                parts[name] += event
    assert reader.is_whole
    return parts


def form(*parts: tuple[str, bytes], before: bytes = b"", after: bytes = b"") -> bytes:
    body = before
    for head, content in parts:
        body += b"--boundary\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + b"--boundary--" + after


NAMED = 'Content-Disposition: form-data; name="%s"'


@given(st.lists(st.integers(0, 400), max_size=12))
def test_a_form_is_the_same_however_it_is_cut(cuts):
    body = form(
        (NAMED % "purpose", b"batch"),
        (NAMED % "empty", b""),
        (NAMED % "file" + '; filename="a.jsonl"\r\nContent-Type: text/plain', CONTENT),
        before=b"preamble\r\n",
        after=b"\r\nepilogue --boundary",
    )
    assert read(body, tuple(cuts)) == {"purpose": b"batch", "empty": b"", "file": CONTENT}


@given(st.binary(max_size=200), st.lists(st.integers(0, 600), max_size=8))
def test_what_a_client_library_writes_is_read(content, cuts):
    request = httpx.Request(
        "POST", "http://x/", files={"file": ('a "b".jsonl', content)}, data={"purpose": "batch"}
    )
    boundary = boundary_of(request.headers["content-type"])
    assert read(request.read(), tuple(cuts), boundary) == {"purpose": b"batch", "file": content}


def test_names_are_unquoted():
    (began,) = FormReader(b"b").feed(
        b'--b\r\ncontent-disposition: form-data; filename="a%22\\"b"; name="file"\r\n\r\n'
    )
    assert began == PartBegan("file", 'a""b')


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"--boundaryX\r\n\r\n", "behind a boundary"),
        (b"--boundary\r\nContent-Type: text/plain\r\n\r\nx", "no name"),
        (b"--boundary\r\nContent-Disposition: form-data\r\n\r\nx", "no name"),
        (b"--boundary\r\n" + b"a" * 9000, "larger than"),
        (b"--boundary\r\n" + b"a" * 9000 + b"\r\n\r\n", "larger than"),
    ],
)
def test_what_is_no_form_says_why(body, why):
    with pytest.raises(InvalidRequest, match=why):
        list(FormReader(b"boundary").feed(body))


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('multipart/form-data; charset=utf-8; Boundary="a b"', b"a b"),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        ('multipart/form-data; boundary=""', None),
        ("multipart/form-data; boundary=" + "a" * 71, None),
        ("multipart/form-data; boundary=é", None),
    ],
)
def test_a_boundary_is_found_or_missed(content_type, boundary):
    if boundary is None:
        with pytest.raises(InvalidRequest, match="boundary"):
            boundary_of(content_type)
    else:
        assert boundary_of(content_type) == boundary
