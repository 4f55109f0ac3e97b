"""Pictures in `octavo chat`: data URLs with the file's own type, and one sentence where none."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from octavo.chat.pictures import media_type, picture_part
from octavo.chat.terminal import ChatDialogue, CompletionDialogue, command_reply
from octavo_engine.errors import ConfigError
from tests.fakes.process import environment, serving
from tests.fakes.seeing import data_url, encoded, write_seeing_model

if TYPE_CHECKING:
    from pathlib import Path

TYPES = {
    "PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif",
    "BMP": "image/bmp",
}  # fmt: skip
IMAGE = Image.new("RGB", (80, 60), "red")


class Backend:
    def chat(self, messages: Any, options: Any) -> Any:
        return messages


BACKEND: Any = Backend()


@pytest.fixture
def picture(tmp_path: Path) -> str:
    file = tmp_path / "a picture.txt"  # neither its name nor its ending matter
    file.write_bytes(encoded(IMAGE))
    return str(file)


@pytest.mark.parametrize("kind", TYPES)
def test_the_type_is_that_of_the_bytes(tmp_path: Path, kind: str) -> None:
    data = encoded(IMAGE, kind)
    file = tmp_path / "picture.jpg"
    file.write_bytes(data)
    part = picture_part(str(file))
    assert part == {"type": "image_url", "image_url": {"url": data_url(data, TYPES[kind])}}
    decoded = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].split(",")[1])))
    assert (decoded.format, decoded.size) == (kind, IMAGE.size)


@pytest.mark.parametrize("data", [b"", b"GIF", b"RIFF1234WAVE", b"text", b"%PDF-1.7"])
def test_other_files_are_no_pictures(tmp_path: Path, data: bytes) -> None:
    assert media_type(data) is None
    file = tmp_path / "file.png"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"file\.png is not a picture; expected PNG, JPEG"):
        picture_part(str(file))


def test_a_picture_goes_with_one_message_and_stays_in_the_conversation(picture: str) -> None:
    dialogue: Any = ChatDialogue(images=[picture])
    part = picture_part(picture)
    first = {"role": "user", "content": [part, {"type": "text", "text": "a"}]}
    assert dialogue.ask(BACKEND, "a", {}) == [first]
    dialogue.answered("a", "b")
    answered = {"role": "assistant", "content": "b"}
    second = {"role": "user", "content": "c"}
    assert dialogue.ask(BACKEND, "c", {}) == [first, answered, second]
    assert command_reply(f"/image {picture}", dialogue) == "(1 picture with the next message)"
    assert command_reply(f"/image {picture}", dialogue) == "(2 pictures with the next message)"
    third = {"role": "user", "content": [part, part, {"type": "text", "text": "d"}]}
    assert dialogue.ask(BACKEND, "d", {}) == [first, answered, third]
    command_reply(f"/image {picture}", dialogue)
    command_reply("/reset", dialogue)
    assert dialogue.ask(BACKEND, "e", {}) == [{"role": "user", "content": "e"}]


def test_a_picture_that_is_refused_does_not_stand_in_the_way(picture: str) -> None:
    dialogue: Any = ChatDialogue(images=[picture])
    dialogue.ask(BACKEND, "a", {})  # and no answer
    assert dialogue.ask(BACKEND, "b", {}) == [{"role": "user", "content": "b"}]


def test_commands_say_what_is_wrong(tmp_path: Path) -> None:
    dialogue = ChatDialogue()
    missing = tmp_path / "none.png"
    reply = command_reply(f"/image {missing}", dialogue)
    assert reply == f"(cannot read {missing}: No such file or directory)"
    assert "is not a file" in str(command_reply(f"/image {tmp_path}", dialogue))
    assert command_reply("/image", dialogue) == "(name a picture: /image FILE)"
    assert "octavo chat has" in str(command_reply("/image a.png", CompletionDialogue()))


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli", *argv],
        capture_output=True, text=True, timeout=60, env=environment(), check=False,
    )  # fmt: skip


def test_a_missing_file_is_one_sentence() -> None:
    done = run("chat", "--url", "http://127.0.0.1:9", "--image", "none.png", "-p", "hi")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "octavo: cannot read none.png: No such file or directory\n"


@pytest.mark.slow
def test_a_model_sees_the_picture_in_this_process_and_over_http(
    tmp_path: Path, picture: str
) -> None:
    folder = str(write_seeing_model(tmp_path / "llava"))
    engine = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1")
    question = ("-p", "what colour is it ?", "--max-tokens", "5", "--temperature", "0")
    blue = tmp_path / "blue.png"
    blue.write_bytes(encoded(Image.new("RGB", (80, 60), "blue")))
    with serving(folder, *engine) as server:
        answers = {}
        for file in (picture, str(blue)):
            there = run("chat", "--url", server.url, "--image", file, *question)
            here = run("chat", folder, *engine, "--image", file, *question)
            assert (there.returncode, here.returncode) == (0, 0), there.stderr + here.stderr
            assert there.stdout == here.stdout
            answers[file] = here.stdout
        assert answers[picture] != answers[str(blue)]
    refused = run("chat", "m", "--device", "sim", "--image", picture, *question)
    assert refused.returncode == 1
    assert refused.stderr.endswith("octavo: this model takes no pictures\n")
