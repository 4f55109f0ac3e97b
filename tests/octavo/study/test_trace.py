"""Recorded traces: equal ids are equal tokens, and a bad line is named."""

import gzip
import json

import pytest

from octavo.study.trace import read_trace
from octavo.study.workload import tokens_of
from octavo_engine.errors import ConfigError

LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def write(tmp_path, *records, name="trace.jsonl"):
    path = tmp_path / name
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_prompts_share_the_blocks_that_their_ids_name(tmp_path, name):
    other = LINE | {"timestamp": 1500, "input_length": 1300, "hash_ids": [0, 7, 1]}
    workload = read_trace(write(tmp_path, LINE, "", other, name=name))

    first, second = workload.arrivals
    assert workload.name == "trace"
    assert [a.delay_s for a in workload.arrivals] == [0.0, 1.5]
    assert tokens_of(first.prompt) == list(range(600))
    tokens = tokens_of(second.prompt)
    assert len(tokens) == 1300
    assert tokens[:512] == list(range(512))
    assert tokens[1024:] == list(range(512, 788))  # block 1, as far as this prompt goes
    assert not set(tokens[512:1024]) & set(range(1024))
    assert len(first.answer) == 5


def test_what_no_id_tells_of_is_shared_with_nobody(tmp_path):
    bare = {"timestamp": 0, "input_length": 100, "output_length": 1}
    first, second = read_trace(write(tmp_path, bare, bare)).arrivals

    assert len(set(tokens_of(first.prompt)) | set(tokens_of(second.prompt))) == 200


def test_arrivals_are_put_in_order_and_may_be_cut_short(tmp_path):
    path = write(tmp_path, LINE | {"timestamp": 900}, LINE, LINE | {"timestamp": 300})

    assert [a.delay_s for a in read_trace(path).arrivals] == [0.0, 0.3, 0.9]
    assert len(read_trace(path, max_requests=2).arrivals) == 2


def test_empty_prompts_and_answers_count_as_one_token(tmp_path):
    empty = LINE | {"input_length": 0, "output_length": 0, "hash_ids": []}
    (arrival,) = read_trace(write(tmp_path, empty)).arrivals

    assert arrival.num_tokens == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 must be a JSON object"),
        (LINE | {"timestamp": "now"}, "line 2: timestamp must be milliseconds; got 'now'"),
        (LINE | {"timestamp": float("nan")}, "line 2: timestamp must be"),
        (LINE | {"input_length": -1}, "line 2: input_length must be a number of tokens; got -1"),
        (LINE | {"output_length": True}, "line 2: output_length must be"),
        (LINE | {"input_length": 10**12}, "line 2: input_length must be"),
        (LINE | {"hash_ids": [1, "a"]}, "line 2: hash_ids must be a list of whole numbers"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem):
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2") as caught:
        read_trace(write(tmp_path, LINE, line))
    assert problem in str(caught.value)


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(write(tmp_path, "", name="empty.jsonl"))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(LINE).encode() * 100)[:40])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(cut)
