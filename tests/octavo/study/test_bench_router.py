"""`octavo bench router`: its table, its files, and one sentence for each mistake."""

import json

import pytest

from octavo import cli

SMALL = ["--num-requests", "12", "--engines", "2", "--kv-blocks", "1000"]


def run(capsys, *argv):
    try:
        code = cli.main(["bench", "router", *argv])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_its_help_shows_examples(capsys):
    code, out, _ = run(capsys, "--help")

    assert code == 0
    assert "octavo bench router --trace requests.jsonl.gz --load 0.9" in out


def test_a_trace_is_replayed_under_each_policy(capsys, tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 700, "output_length": 4, "hash_ids": [i % 3, 9 + i]}
        for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = run(
        capsys, "--trace", str(path), "--policies", "prefix-load,random", *SMALL,
        "--json", str(tmp_path / "out.json"),
    )  # fmt: skip

    assert (code, err) == (0, "")
    assert out.startswith("mine: 12 requests arriving in 1 s, 2 engines (gpu-8b, 16,000 tokens")
    assert "\n| prefix-load |" in out
    assert "\n| random      |" in out
    (study,) = json.loads((tmp_path / "out.json").read_text())["studies"]
    assert [figures["num_requests"] for figures in study["policies"]] == [12, 12]
    assert study["policies"][0]["hit_rate"] > 0.4


def test_several_workloads_and_json_on_stdout(capsys):
    code, out, _ = run(
        capsys, "--workload", "random", "--workload", "multi-turn", "--policies", "least-load",
        "--shape", "text", "--load", "0.5", *SMALL, "--json", "-",
    )  # fmt: skip

    studies = json.loads(out)["studies"]
    assert code == 0
    assert [study["workload"] for study in studies] == ["random", "multi-turn"]
    assert studies[0]["load"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "give --trace FILE, or --workload NAME"),
        (["--workload", "odd"], "--workload: no 'odd'; there are multi-turn, shared-system"),
        (["--workload", "random", "--policies", "best"], "--policies: no policy 'best'; there are"),
        (["--workload", "random", "--engine-model", "tpu"], "there is no 'tpu'; there are gpu-8b"),
        (["--workload", "random", "--load", "1", "--speed", "2"], "both set the pace"),
        (["--workload", "random", "--load", "0"], "must be a number above 0; got 0"),
        (["--workload", "random", "--signal-delay-ms", "-1"], "must be a number that is not neg"),
        (["--workload", "random", "--plot", "x.gif"], "--plot must end in"),
        (["--trace", "nowhere.jsonl"], "the trace nowhere.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, argv, problem):
    code, out, err = run(capsys, *argv)

    assert (code, out) == (2, "")
    assert problem in err
    assert err.count("\n") == 1
