"""What speculation gains is measured in pairs, kept, and never where answers differ."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.speculation.__main__ import parse
from benchmarks.speculation.figures import Cell, Figures, Pair, Run, losses, table
from benchmarks.speculation.llama import LlamaServer, body_of, command_of, measure_llama
from benchmarks.speculation.measure import (
    batch_of,
    cells_of,
    describe_pair,
    measure,
    measure_cell,
    speculation_of,
)
from benchmarks.speculation.prompts import KINDS, requests
from octavo import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.speculation.prompts import Request


def pair(plain: float, drafted: float, length: float | None = 2.0) -> Pair:
    return Pair(plain, drafted, 0.9, length, 2.0)


# -- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_a_seed_are_the_same_and_those_to_measure_are_others(kind: str) -> None:
    some = requests(kind, 40, seed=1, held_out=True, vocab_size=500)
    assert some == requests(kind, 40, seed=1, held_out=True, vocab_size=500)
    assert some[:20] == requests(kind, 20, seed=1, held_out=True, vocab_size=500)
    trained = requests(kind, 400, seed=2, held_out=False, vocab_size=500)
    assert not {one.content or one.token_ids for one in some} & {
        one.content or one.token_ids for one in trained
    }
    assert all(one.kind == kind and (one.content or max(one.token_ids) < 500) for one in some)
    assert all((one.schema is not None) == (kind == "json") for one in some)


def test_many_streams_have_a_request_each_and_one_has_some_in_turn() -> None:
    args = parse(["measure", "--requests", "3", "--max-tokens", "7", "--temperature", "0.5"])
    for streams, count in ((1, 3), (8, 8)):
        batch, params = batch_of("json", streams, args, 500)
        assert len(batch) == len(params) == count
        assert all(one.max_tokens == 7 and one.grammar is not None for one in params)
        assert {one.temperature for one in params} == {0.5}
    _, noise = batch_of("random", 1, args, 500)
    assert {one.temperature for one in noise} == {1.0}


def test_methods_become_speculative_configs() -> None:
    def of(method: str) -> dict[str, Any]:
        return speculation_of(method, num_tokens=3, quantization="int8")

    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    assert of("ngram") == {"method": "ngram", "num_speculative_tokens": 3} | lookup
    assert of("suffix") == {"method": "suffix"}
    head = {"num_speculative_tokens": 3, "model": "/heads", "quantization": "int8"}
    assert of("eagle3=/heads") == {"method": "eagle3"} | head


# -- figures --------------------------------------------------------------------------------------


def test_what_was_measured_is_there_again_but_not_a_line_cut_off(tmp_path: Path) -> None:
    file, cell = tmp_path / "new" / "figures.jsonl", Cell("ngram", "chat", 1, "{}")
    figures = Figures(file)
    figures.add(cell, pair(10, 20))
    figures.add(cell, pair(10, 21, None))
    with file.open("a") as more:
        more.write('{"cell": {"meth')
    assert Figures(file).cells == {cell: [pair(10, 20), pair(10, 21, None)]}


def test_a_pair_has_the_acceptance_length_of_steps_with_drafts() -> None:
    plain = Run(2.0, 3.0, 40, 40, 0, 0, [])
    drafted = Run(1.0, 2.4, 40, 25, 20, 15, [])
    found = Pair.of(plain, drafted)
    assert found._replace(processor_ratio=None) == Pair(20.0, 40.0, None, 1.75, 1.6)
    assert found.processor_ratio == pytest.approx(0.8)
    assert describe_pair(found) == (
        "2.00 times as fast, 0.80 times the processor time, acceptance length 1.75"
    )
    assert describe_pair(Pair.of(plain, plain._replace(processor_s=None))) == (
        "1.00 times as fast, nothing drafted"
    )


def test_the_table_has_medians_and_what_got_slower_is_named() -> None:
    cells = {
        Cell("ngram", "chat", 1, "{}"): [pair(10, 11), pair(10, 15), pair(10, 30)],
        Cell("ngram", "chat", 16, "{}"): [pair(100, 97)],
        Cell("suffix", "json", 16, "{}"): [pair(100, 98, None)],
    }
    assert table(cells)[2:] == [
        "| ngram | chat | 10 → 15 | 2.00 | 1.50 | 0.97 |",
        "| suffix | json | - | - | - | 0.98 |",
    ]
    assert losses(cells) == ["ngram, chat, 16 streams: 0.97 times the tokens/s without"]


# -- measuring ------------------------------------------------------------------------------------


class Fixed:
    """A server that gives the same answers, at its own speed."""

    def __init__(self, tokens_per_s: float, token_ids: list[list[int]]) -> None:
        self.tokens_per_s = tokens_per_s
        self.token_ids = token_ids
        self.num_batches: list[int] = []

    def answer(
        self, batch: Sequence[Request], params: Sequence[SamplingParams], streams: int
    ) -> Run:
        self.num_batches.append(len(batch))
        count = sum(map(len, self.token_ids))
        return Run(count / self.tokens_per_s, 1.0, count, count, 1, 1, self.token_ids)


def measured(
    tmp_path: Path, *servers: Fixed, until: float | None = None
) -> tuple[Figures, Cell, argparse.Namespace]:
    args = parse(["measure", "--pairs", "2", "--requests", "3"])
    figures, cell = Figures(tmp_path / "figures.jsonl"), next(cells_of("ngram", args))
    plain, drafted = servers
    end = time.monotonic() + 60 if until is None else until
    measure_cell(cell, (plain, drafted), args, figures, 500, end)
    return figures, cell, args


def test_pairs_that_are_missing_are_measured_after_a_warm_up(tmp_path: Path) -> None:
    servers = Fixed(10, [[1, 2]]), Fixed(20, [[1, 2]])
    figures, cell, _ = measured(tmp_path, *servers)
    assert [one.gain for one in figures.cells[cell]] == [2.0, 2.0]
    assert servers[0].num_batches == [2, 3, 3]
    again = Fixed(10, [[1, 2]]), Fixed(20, [[1, 2]])
    measured(tmp_path, *again)
    assert again[0].num_batches == []


def test_each_is_first_in_every_other_pair(tmp_path: Path) -> None:
    order: list[str] = []

    class Noting(Fixed):
        def answer(self, *args: Any) -> Run:
            order.append("plain" if self.tokens_per_s == 10 else "drafted")
            return super().answer(*args)

    figures, cell, _ = measured(tmp_path, Noting(10, [[1]]), Noting(20, [[1]]))
    assert order == ["plain", "drafted", "plain", "drafted", "drafted", "plain"]
    assert [one.gain for one in figures.cells[cell]] == [2.0, 2.0]


def test_nothing_is_measured_when_the_time_is_over(tmp_path: Path) -> None:
    servers = Fixed(10, [[1, 2]]), Fixed(20, [[1, 2]])
    figures, cell, _ = measured(tmp_path, *servers, until=time.monotonic() - 1)
    assert figures.count(cell) == 0 and servers[0].num_batches == []


def test_answers_that_differ_end_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ngram, chat: the answers differ; they must not"):
        measured(tmp_path, Fixed(10, [[1, 2]]), Fixed(20, [[1, 3]]))


def test_single_streams_come_first_and_settings_keep_figures_apart() -> None:
    args = parse(
        ["measure", "--kind", "chat", "--kind", "code", "--streams", "4", "--streams", "1"]
    )
    cells = list(cells_of("ngram", args))
    assert [(cell.kind, cell.streams) for cell in cells] == [
        ("chat", 1), ("code", 1), ("chat", 4), ("code", 4),
    ]  # fmt: skip
    other = parse(["measure", "--max-tokens", "5"])
    assert not {*cells_of("ngram", args)} & {*cells_of("ngram", other)}


@pytest.mark.slow
def test_engines_are_measured_and_answer_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo model, with drafts from its prompt: a line for each pair, and the table."""
    out = tmp_path / "figures.jsonl"
    kinds = ["--kind", "summaries", "--kind", "json", "--kind", "random"]
    values = [
        "measure", "--method", "ngram", "--streams", "1", "--streams", "2", "--requests", "2",
        "--pairs", "1", "--max-tokens", "24", "--threads", "1", "--out", str(out), *kinds,
    ]  # fmt: skip
    measure(parse(values))
    assert len(out.read_text().splitlines()) == 6
    first = capsys.readouterr().out
    assert "ngram, summaries, 1 streams: " in first and "| ngram | random |" in first
    measure(parse(values))  # all is there
    assert " tokens/s, " not in capsys.readouterr().out.replace(" tokens/s, one", "")
    assert len(out.read_text().splitlines()) == 6


# -- llama.cpp ------------------------------------------------------------------------------------


@pytest.fixture
def replies() -> Iterator[tuple[str, list[Any], list[tuple[str, Any]]]]:
    """A server that replies what the list has, and what it was sent."""
    given: list[Any] = []
    seen: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(
                (self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )
            status, body = given.pop(0)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", given, seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_llama_counts_a_step_for_each_token_that_was_not_accepted(replies: Any) -> None:
    url, given, seen = replies
    timings = {"predicted_n": 40, "predicted_ms": 500.0}
    given += [(200, {"timings": timings}),
              (200, {"timings": timings | {"draft_n": 30, "draft_n_accepted": 20}})]  # fmt: skip
    batch = requests("chat", 2, seed=0, held_out=True)
    params = [SamplingParams(temperature=0.0, max_tokens=9, seed=3)] * 2
    assert LlamaServer(url).answer(batch, params, 1) == Run(1.0, None, 80, 60, 60, 20, [])
    path, body = seen[0]
    assert path == "/v1/chat/completions" and body["max_tokens"] == 9 and body["seed"] == 3
    assert body["messages"] == [{"role": "user", "content": batch[0].content}]


def test_llama_is_sent_schemas_and_tokens_by_its_own_names() -> None:
    params = SamplingParams(max_tokens=9)
    (noise,) = requests("random", 1, seed=0, held_out=True, vocab_size=99)
    path, body = body_of(noise, params)
    assert path == "/completion" and body["prompt"] == list(noise.token_ids)
    assert body["n_predict"] == 9
    (wanted,) = requests("json", 1, seed=0, held_out=True)
    _, body = body_of(wanted, params)
    assert body["response_format"]["json_schema"]["schema"] == wanted.schema


@pytest.mark.parametrize(
    ("reply", "message"),
    [((400, {"error": "no such field"}), "refused a request: .*no such field"),
     ((200, {"choices": []}), "reported no timings: use a version of 2025 or later")],
)  # fmt: skip
def test_what_llama_refuses_ends_it(reply: Any, message: str, replies: Any) -> None:
    url, given, _ = replies
    given.append(reply)
    with pytest.raises(SystemExit, match=message):
        LlamaServer(url).answer(
            requests("chat", 1, seed=0, held_out=True), [SamplingParams(max_tokens=9)], 1
        )


def test_llama_needs_a_model_and_arguments_and_must_start(tmp_path: Path) -> None:
    figures, soon = Figures(tmp_path / "figures.jsonl"), time.monotonic() + 60
    args = parse(["measure", "--llama-server", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="also needs --gguf and --llama-args"):
        measure_llama(args, figures, 500, soon)
    args = parse(["measure", "--llama-server", str(tmp_path / "none"), "--gguf", "model.gguf",
                  "--llama-args", "--draft-max 3", "--threads", "2"])  # fmt: skip
    assert command_of(args, 8000, ["--draft-max", "3"])[-4:] == ["-t", "2", "--draft-max", "3"]
    with pytest.raises(SystemExit, match="cannot be started"):
        measure_llama(args, figures, 500, soon)
