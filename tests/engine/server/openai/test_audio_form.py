"""The form of a transcription: what it may say, and bodies that are no form."""

from __future__ import annotations

import random

import pytest

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.multipart import FormReader, PartBegan
from octavo_engine.server.openai.audio.form import AudioFields, check_fields

FILE = {"file": [b"sound"]}


def test_defaults() -> None:
    assert check_fields(FILE) == AudioFields(b"sound", None, None, "", "json", None, False)


def test_all_fields() -> None:
    fields = {
        "model": [b"w"], "language": [b"German"], "prompt": [b"Names"], "temperature": [b"0.4"],
        "response_format": [b"verbose_json"], "timestamp_granularities": [b"segment"],
    }  # fmt: skip
    expected = AudioFields(
        b"sound", "w", "de", "Names", "verbose_json", 0.4, False, frozenset({"segment"})
    )
    assert check_fields(FILE | fields) == expected
    assert check_fields(FILE | {"stream": [b"True"], "temperature": [b"0"]}).stream


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": [b"xx"]}, "language"),
        ({"temperature": [b"1.5"]}, "temperature"),
        ({"temperature": [b"nan"]}, "temperature"),
        ({"temperature": [b"warm"]}, "temperature"),
        ({"response_format": [b"pdf"]}, "response_format"),
        ({"stream": [b"maybe"]}, "stream"),
        ({"stream": [b"true"], "response_format": [b"srt"]}, "stream"),
        ({"timestamp_granularities": [b"word"]}, "timestamp_granularities"),
        ({"timestamp_granularities": [b"segment"]}, "timestamp_granularities"),
        ({"prompt": [b"a" * 20_000]}, "prompt"),
        ({"prompt": [b"\xff"]}, "prompt"),
        ({"model": [b"a", b"b"]}, "model"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, list[bytes]], param: str) -> None:
    with pytest.raises(InvalidRequest) as info:
        check_fields(FILE | fields)
    assert info.value.param == param and param in info.value.message


def test_a_file_is_needed() -> None:
    with pytest.raises(InvalidRequest, match="file is missing"):
        check_fields({})


def test_mutated_forms_are_read_or_refused() -> None:
    rng = random.Random(5)
    whole = (
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nsound\r\n'
        b'--b\r\ncontent-disposition: form-data; name="language"\r\n\r\nen\r\n--b--\r\n'
    )
    read = 0
    for _ in range(5000):
        data = bytearray(whole)
        for _ in range(rng.randrange(0, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        reader, parts, name = FormReader(b"b"), {}, ""
        cut = rng.randrange(len(data))
        try:
            for piece in (bytes(data[:cut]), bytes(data[cut:])):
                for item in reader.feed(piece):
                    if isinstance(item, PartBegan):
                        name = item.name
                        parts[name] = [b""]
                    else:
                        parts[name][0] += item
            check_fields(parts)
            read += 1
        except InvalidRequest:
            continue
    assert 1000 < read < 5000
