"""The lines of batch files: what is a request, what is not, and what an earlier run answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_engine.server.openai.batches.lines import (
    BadLine,
    BatchTask,
    FinishedLine,
    LineReader,
    answered,
    refused,
)

URL = "/v1/completions"


def line(**fields: Any) -> bytes:
    return json.dumps({"method": "POST", "url": URL, "body": {}, **fields}).encode() + b"\n"


def test_a_request_is_read_with_its_line():
    entries = list(LineReader().read([b"\n", line(custom_id="a", body={"prompt": "é"}), b"  \n"]))
    assert entries == [BatchTask(2, "a", URL, '{"prompt":"é"}'.encode())]


@pytest.mark.parametrize(
    ("text", "custom_id", "problem"),
    [
        (b"no", None, "not valid JSON"),
        (b'{"custom_id":"\xff"}', None, "not valid JSON"),
        (b'{"custom_id":' * 5000, None, "not valid JSON"),
        (b"[]", None, "must be a JSON object"),
        (line(), None, "custom_id must be a string"),
        (line(custom_id=""), None, "custom_id must be a string"),
        (line(custom_id=5), None, "custom_id must be a string"),
        (line(custom_id="a", method="GET"), "a", "method must be POST"),
        (line(custom_id="a", url="/v1/files"), "a", "url must be one of"),
        (line(custom_id="a", url=None), "a", "url must be one of"),
        (line(custom_id="a", body=[]), "a", "body must be a JSON object"),
        (line(custom_id="a", body={"stream": True}), "a", "stream is not supported"),
    ],
)
def test_a_line_that_is_no_request_says_why(text, custom_id, problem):
    (entry,) = LineReader().read([text])
    assert isinstance(entry, BadLine)
    assert (entry.number, entry.custom_id) == (1, custom_id)
    assert problem in entry.problem


def test_an_id_is_taken_once():
    first, second = LineReader().read([line(custom_id="a"), line(custom_id="a")])
    assert isinstance(first, BatchTask)
    assert second == BadLine(2, "a", "custom_id was given before")


def test_answers_in_openais_shape():
    reported = json.loads(answered(BatchTask(1, "a", URL, b"{}"), 404, "req", b'{"error":{}}'))
    assert reported.pop("id").startswith("batch_req_")
    assert reported == {
        "custom_id": "a",
        "response": {"status_code": 404, "request_id": "req", "body": {"error": {}}},
        "error": None,
    }
    reported = json.loads(refused(BadLine(7, None, "odd")))
    assert reported["response"] is None
    assert reported["error"] == {"code": "invalid_line", "message": "line 7: odd", "line": 7}


def test_what_was_answered_is_left_out():
    lines = [line(custom_id="a"), b"no\n", line(custom_id="b"), line(custom_id="a"), b"odd\n"]
    before = [answered(BatchTask(1, "a", URL, b""), 200, "", b"{}"), refused(BadLine(2, None, "x"))]
    left = list(LineReader(FinishedLine.read(before)).read(lines))
    assert [(entry.number, entry.custom_id) for entry in left] == [(3, "b"), (4, "a"), (5, None)]


def test_a_file_that_holds_no_answers_is_not_gone_on_with():
    with pytest.raises(ValueError, match="line 2 is not an answer"):
        FinishedLine.read([refused(BadLine(1, None, "x")), b"text\n"])
