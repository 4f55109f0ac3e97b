"""All faults of a command line, its variables and its file are reported at once, on one line."""

from __future__ import annotations

import pytest

from octavo import cli


def refused(capsys, *argv: str) -> str:
    try:
        code = cli.main(argv)
    except SystemExit as ended:
        code = int(ended.code or 0)
    err: str = capsys.readouterr().err
    assert code == cli.EXIT_SETTINGS
    assert err.count("\n") == 1, "of a pod that ended, the status shows the last line"
    return err


def test_values_that_cannot_be_parsed(capsys):
    err = refused(capsys, "serve", "m", "--max-model-len", "abc", "--dtype", "foo", "--port", "1")
    assert err.startswith("octavo serve: 2 settings cannot be used: (1) argument --max-model-len:")
    assert "; (2) argument --dtype: invalid choice: 'foo'" in err


def test_values_that_cannot_work_of_engine_and_server(capsys):
    err = refused(
        capsys, "serve", "m", "--max-num-seqs", "-1", "--max-num-batched-tokens", "0",
        "--port", "99999",
    )  # fmt: skip
    assert err == (
        "octavo: 3 settings cannot be used: (1) --max-num-seqs must be at least 1; got -1; "
        "(2) --max-num-batched-tokens must be at least 1; got 0; "
        "(3) --port must be between 0 and 65535; got 99999\n"
    )


def test_one_fault_is_not_numbered(capsys):
    assert refused(capsys, "serve", "m", "--port", "99999") == (
        "octavo: --port must be between 0 and 65535; got 99999\n"
    )


@pytest.mark.parametrize(
    ("argv", "only"),
    [
        # Without --nnodes, a node rank above 0 would be a fault as well.
        (["--nnodes", "2", "--node-rank", "1"], "--nnodes has a stage on each host"),
        (["--max-loras", "0", "--max-cpu-loras", "0"], "--max-loras must be from 1"),
    ],
)
def test_faults_that_leaving_one_out_would_cause_are_not_reported(capsys, argv, only):
    assert refused(capsys, "serve", "m", *argv).startswith(f"octavo: {only}")


def test_flags_of_vllm_that_are_not_supported(capsys):
    err = refused(capsys, "serve", "m", "--swap-space", "4", "--enable-dbo", "--block-size", "16")
    assert err.startswith("octavo: 2 settings cannot be used: (1) --swap-space is not supported: ")
    assert "; (2) --enable-dbo is not supported: " in err


def test_variables_and_keys_of_the_file(capsys, monkeypatch, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("port: hello\nmax-num-sqes: 4\nseed: 1\n")
    monkeypatch.setenv("OCTAVO_MAX_QUEUE", "z")
    err = refused(capsys, "serve", "m", "--config", str(file))
    assert err.startswith("octavo: 3 settings cannot be used: ")
    assert "OCTAVO_MAX_QUEUE must be a whole number; got 'z'" in err
    assert "config file: port must be a whole number; got 'hello'" in err
    assert "unknown key max-num-sqes; did you mean max-num-seqs?" in err


def test_every_mistyped_flag_gets_its_suggestion(capsys):
    err = refused(capsys, "serve", "m", "--max-modle-len", "5", "--dtipe", "x")
    assert err.endswith("; did you mean --max-model-len and --dtype?\n")
