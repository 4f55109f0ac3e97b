"""Speech to text over HTTP with real weights: Whisper tiny.en, beside faster-whisper."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from octavo_engine.speech.decode import decode_audio
from tests.engine.speech.test_decode import wav
from tests.fakes.process import ServeProcess, serving
from tests.fakes.whisper_files import model_source, real_whisper

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.slow

SENTENCES = (
    "She sells sea shells by the sea shore, and the weather in the north is cold today.",
    "The train to the city leaves at nine in the morning. Please do not forget your ticket.",
    "A small model runs on two cores and writes down what people say.",
)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    folder = tmp_path_factory.mktemp("sounds")
    paths = [folder / f"{i}.wav" for i in range(len(SENTENCES))]
    for path, text in zip(paths, SENTENCES, strict=True):
        subprocess.run(["espeak-ng", "-s", "140", "-w", str(path), text], check=True)
    return paths


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = real_whisper(tmp_path_factory.mktemp("whisper"))
    with serving(
        "--device", "cpu", "--model", str(folder), "--served-model-name", "whisper",
        "--dtype", "float32",
    ) as process:  # fmt: skip
        yield process


@pytest.fixture
def client(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def padded_samples(path: Path) -> NDArray[np.float32]:
    samples = decode_audio(path.read_bytes())
    padded = np.zeros(480_000, np.float32)
    padded[: len(samples)] = samples
    return padded


def peer_text(path: Path) -> str:
    """It pads frames with zeros where Whisper's authors pad sound with silence: so pad it here."""
    faster_whisper = pytest.importorskip("faster_whisper")
    padded = padded_samples(path)
    model = faster_whisper.WhisperModel(str(model_source()), device="cpu", compute_type="float32")
    segments, _ = model.transcribe(padded, beam_size=1, best_of=1, language="en")
    return "".join(segment.text for segment in segments)


def test_the_same_words_as_faster_whisper(client: openai.OpenAI, sounds: list[Path]) -> None:
    for path in sounds:
        ours = client.audio.transcriptions.create(model="whisper", file=path).text
        assert words(ours) == words(peer_text(path))
        assert len(words(ours)) > 8


def test_every_format(client: openai.OpenAI, sounds: list[Path]) -> None:
    create: Any = client.audio.transcriptions.create

    def ask(response_format: str) -> Any:
        return create(model="whisper", file=sounds[1], response_format=response_format)

    text = ask("text").strip()
    verbose = ask("verbose_json")
    assert verbose.text == text and verbose.language == "english"
    assert 4 < verbose.duration < 12
    assert "".join(segment.text for segment in verbose.segments).strip() == text
    for segment in verbose.segments:
        assert 0 <= segment.start < segment.end <= verbose.duration + 0.01
        assert -1 < segment.avg_logprob < 0 and 0 <= segment.no_speech_prob < 0.6
    assert ask("vtt").startswith("WEBVTT\n\n00:00:00.000 --> ")
    assert re.match(r"1\n00:00:00,000 --> 00:00:0\d,\d\d\d\n", ask("srt"))


def peer_words(path: Path) -> list[tuple[str, float, float]]:
    faster_whisper = pytest.importorskip("faster_whisper")
    model = faster_whisper.WhisperModel(str(model_source()), device="cpu", compute_type="float32")
    segments, _ = model.transcribe(
        padded_samples(path), beam_size=1, best_of=1, language="en", word_timestamps=True
    )
    return [(w.word.strip(), w.start, w.end) for s in segments for w in s.words]


def test_words_have_the_times_of_faster_whisper(client: openai.OpenAI, sounds: list[Path]) -> None:
    """But for roundings: a step of the path is two hundredths of a second."""
    differences = []
    for path in sounds:
        said = client.audio.transcriptions.create(
            model="whisper", file=path, response_format="verbose_json",
            timestamp_granularities=["word"],
        )  # fmt: skip
        assert said.segments is None and said.words is not None
        assert "".join(w.word for w in said.words) == said.text.replace(" ", "")
        times = [t for w in said.words for t in (w.start, w.end)]
        assert times == sorted(times) and times[0] >= 0 and times[-1] <= said.duration + 0.05
        peer = peer_words(path)
        assert [w.word for w in said.words] == [word for word, _, _ in peer]
        pairs = zip(said.words, peer, strict=True)
        differences += [abs(own.start - start) for own, (_, start, _) in pairs]
    assert np.median(differences) <= 0.001
    assert max(differences) <= 0.1
    both = client.audio.transcriptions.create(
        model="whisper", file=sounds[0], response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )  # fmt: skip
    assert both.segments and both.words


def test_a_stream_says_the_same(client: openai.OpenAI, sounds: list[Path]) -> None:
    whole = client.audio.transcriptions.create(model="whisper", file=sounds[0])
    with client.audio.transcriptions.create(model="whisper", file=sounds[0], stream=True) as stream:
        events = list(stream)
    deltas = [e.delta for e in events if e.type == "transcript.text.delta"]
    assert events[-1].type == "transcript.text.done"
    assert "".join(deltas) == events[-1].text and events[-1].text.strip() == whole.text


def test_eight_at_once_say_what_each_says_alone(client: openai.OpenAI, sounds: list[Path]) -> None:
    def ask(path: Path) -> str:
        return client.audio.transcriptions.create(model="whisper", file=path).text

    alone = [ask(path) for path in sounds]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, (sounds * 3)[:8]))
    assert together == (alone * 3)[:8]


def test_the_command_line_writes_the_text(
    server: ServeProcess, client: openai.OpenAI, sounds: list[Path], tmp_path: Path
) -> None:
    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "octavo.cli", "transcribe", str(path), "--url", server.url]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    text = client.audio.transcriptions.create(model="whisper", file=sounds[2]).text
    done = run(sounds[2])
    assert (done.returncode, done.stdout) == (0, f"{text}\n")
    (tmp_path / "empty.wav").write_bytes(b"")
    failed = run(tmp_path / "empty.wav")
    assert (failed.returncode, failed.stderr) == (
        1,
        "octavo: the server answered 400: file is empty\n",
    )


def test_silence_has_no_words(server: ServeProcess, tmp_path: Path) -> None:
    path = tmp_path / "silence.wav"
    path.write_bytes(wav(np.zeros(24_000, np.float32), 8000))
    with server.client() as http:
        answer = http.post("/v1/audio/transcriptions", files={"file": path.read_bytes()})
    assert answer.status_code == 200
    assert len(words(answer.json()["text"])) < 3
    assert answer.json()["usage"] == {"type": "duration", "seconds": 3}


def test_what_the_model_cannot_do_is_refused(server: ServeProcess, sounds: list[Path]) -> None:
    chat = {"model": "whisper", "messages": [{"role": "user", "content": "Hello"}]}
    sound = {"file": sounds[0].read_bytes()}
    path = "/v1/audio/transcriptions"
    with server.client() as http:
        answers = [
            (http.post("/v1/completions", json={"prompt": "a"}), "cannot generate"),
            (http.post("/v1/chat/completions", json=chat), ""),
            (http.post("/v1/audio/translations", files=sound), "cannot translate"),
            (http.post(path, files=sound, data={"language": "de"}), "language de"),
            (http.post(path, files={"file": b"RIFF....WAVEnothing"}), "cannot be read as audio"),
            (http.post(path, files=sound, data={"temperature": "2"}), "temperature"),
        ]
        missing = http.post(path, files=sound, data={"model": "other"})
    for answer, reason in answers:
        assert answer.status_code == 400, answer.text
        assert reason in answer.json()["error"]["message"]
    assert missing.status_code == 404


def test_a_time_limit_is_of_the_file_and_not_of_each_window(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    """Each of many windows is done in time, all of them are not."""
    path = tmp_path / "long.wav"
    path.write_bytes(wav(np.random.default_rng(1).normal(0, 0.3, 16_000 * 600), 16_000))
    limit = {"X-Octavo-Timeout-Ms": "2500"}
    began = time.monotonic()
    with path.open("rb") as file, pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(model="whisper", file=file, extra_headers=limit)
    assert caught.value.status_code == 504
    assert time.monotonic() - began < 6.0
