"""`python -m octavo_engine.speech.decode_process SECONDS CPU_SECONDS`: file on stdin, samples out.

Writes float32 samples, mono at 16 kHz. Ends with 1 and a line on stderr where the file is no audio.
"""

from __future__ import annotations

import io
import math
import resource
import sys

import av

from octavo_engine.speech.mel import SAMPLE_RATE

MAX_MEMORY = 2 << 30


def main(arguments: list[str]) -> int:
    max_seconds, cpu_seconds = float(arguments[0]), math.ceil(float(arguments[1]))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    data = sys.stdin.buffer.read()
    av.logging.set_level(av.logging.PANIC)
    try:
        return _decode(data, int(max_seconds * SAMPLE_RATE))
    except (av.error.FFmpegError, ValueError, EOFError) as error:
        lines = str(error).splitlines() or ["invalid data"]
        sys.stderr.write(f"{lines[0][:200]}\n")
    except MemoryError:
        sys.stderr.write("decoding needs too much memory\n")
    return 1


def _decode(data: bytes, max_samples: int) -> int:
    total = 0
    # No other file is opened, whatever a playlist in the bytes names.
    with av.open(io.BytesIO(data), "r", options={"protocol_whitelist": "pipe"}) as container:
        if not container.streams.audio:
            raise ValueError("it has no audio stream")
        resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
        for frame in container.decode(container.streams.audio[0]):
            for part in resampler.resample(frame):
                total += _write(part)
            if total > max_samples:
                sys.stderr.write("too long\n")
                return 1
        for part in resampler.resample(None):
            total += _write(part)
    if total == 0:
        raise ValueError("it has no sound")
    return 0


def _write(frame: av.AudioFrame) -> int:
    samples = frame.to_ndarray().reshape(-1)[: frame.samples]
    sys.stdout.buffer.write(samples.tobytes())
    return int(frame.samples)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
