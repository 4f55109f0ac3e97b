"""`octavo run-batch` as people run it, over a simulated model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.process import environment

if TYPE_CHECKING:
    from pathlib import Path


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(fields) + "\n"


INPUT = "".join(
    (
        line("text", prompt="hi", max_tokens=3),
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}],
             max_tokens=3),
        "this is no JSON\n",
        line("odd", "/v1/files"),
        "\n",
        line("text", prompt="again"),
        line("model", prompt="hi", model="other"),
        line("vectors", "/v1/embeddings", input="x"),
        line("sound", "/v1/audio/translations"),
    )
)  # fmt: skip
STATUSES = {"text": 200, "chat": 200, "model": 404, "vectors": 400, "sound": 400}


def run_batch(*flags: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli", "run-batch", "m", "--device", "sim", *flags]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=60, check=False,
        env=environment(),
    )  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(INPUT)
    return source, target


@pytest.mark.slow
def test_every_line_has_its_answer(files):
    source, target = files
    done = run_batch("-i", str(source), "-o", str(target))

    reported = [json.loads(text) for text in target.read_text().splitlines()]
    assert done.returncode == 1, done.stderr
    assert done.stderr == "2 answered, 6 failed\n"
    ids = ["text", "chat", None, "odd", "text", "model", "vectors", "sound"]
    assert [each["custom_id"] for each in reported] == ids
    assert [each["error"]["line"] for each in reported if each["error"]] == [3, 4, 6]
    statuses = {
        each["custom_id"]: each["response"]["status_code"] for each in reported if each["response"]
    }
    assert statuses == STATUSES
    assert reported[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert reported[6]["response"]["body"]["error"]["code"] == "wrong_task"


@pytest.mark.slow
def test_an_output_that_is_there_is_gone_on_with_or_refused(files):
    source, target = files
    source.write_text(line("a", prompt="x", max_tokens=1) + line("b", prompt="y", max_tokens=1))
    whole = run_batch("-i", str(source), "-o", str(target))
    assert (whole.returncode, whole.stderr) == (0, "2 answered\n")
    first, second = target.read_text().splitlines(keepends=True)

    refused = run_batch("-i", str(source), "-o", str(target))
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    assert target.read_text() == first + second

    target.write_text(first + second[:40])  # as after a kill
    resumed = run_batch("-i", str(source), "-o", str(target), "--resume")
    assert (resumed.returncode, resumed.stderr) == (0, "1 answered\n")
    reported = [json.loads(text) for text in target.read_text().splitlines()]
    assert [each["custom_id"] for each in reported] == ["a", "b"]
    assert target.read_text().startswith(first)


@pytest.mark.slow
def test_a_pipe_goes_through():
    done = run_batch("-i", "-", "-o", "-", stdin=line("a", prompt="x", max_tokens=1))
    assert done.returncode == 0
    assert json.loads(done.stdout)["custom_id"] == "a"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("-i", "/none/in", "-o", "-"), "--input-file /none/in: No such file"),
        (("-i", "ftp://host/in", "-o", "-"), "only files, http"),
        (("-i", "-", "-o", "http://host/out", "--resume"), "on this disk"),
        (("-i", "http://127.0.0.1:9/in?sig=secret", "-o", "-"), "127.0.0.1:9/in: cannot be"),
        (("-i", "-", "-o", "/none/out"), "--output-file /none/out: No such file"),
        (("-i", "-", "-o", "-", "--resume"), "--resume needs an --output-file"),
        (("-i", "-"), "-o/--output-file"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(flags, says):
    done = run_batch(*flags)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_names_the_file_and_how_to_go_on():
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli", "run-batch", "m", "--device", "sim", "-i", "-",
         "-o", "/dev/full"],
        input=line("a", prompt="hi", max_tokens=2), text=True, capture_output=True, check=False,
        env=environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "octavo: --output-file /dev/full: No space left on device; free some space, "
        "and go on with --resume"
    )


@pytest.mark.slow
def test_a_line_of_a_batch_takes_a_picture(tmp_path: Path) -> None:
    from PIL import Image

    from tests.engine.models.tiny_seeing import seeing_model
    from tests.fakes.seeing import data_url, encoded, write_seeing_model

    folder = write_seeing_model(tmp_path / "llava")
    red = data_url(encoded(Image.new("RGB", (80, 60), "red")))
    parts = [
        {"type": "text", "text": "what"},
        {"type": "image_url", "image_url": {"url": red}},
    ]
    broken = [parts[0], {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(
            line(name, "/v1/chat/completions", messages=[{"role": "user", "content": content}],
                 max_tokens=3)
            for name, content in (("text", parts[:1]), ("seen", parts), ("broken", broken))
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "octavo.cli", "run-batch", str(folder), "--device", "cpu",
               "-i", str(source), "-o", str(target)]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment()
    )
    answers = {
        answer["custom_id"]: answer["response"]
        for answer in map(json.loads, target.read_text().splitlines())
    }
    assert {name: answer["status_code"] for name, answer in answers.items()} == {
        "text": 200, "seen": 200, "broken": 400
    }, done.stderr  # fmt: skip
    counts = [answers[name]["body"]["usage"]["prompt_tokens"] for name in ("text", "seen")]
    assert counts[1] - counts[0] == seeing_model("llava").media.num_rows
