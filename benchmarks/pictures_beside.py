"""What a stream of others notices while pictures arrive.

    python -m benchmarks.vision_model train FOLDER      (once; or any model that sees)
    python -m benchmarks.pictures_beside FOLDER [--streams 2] [--pictures 10] [--rounds 5]

Streams of text are read token by token, first with nothing else on the server, then while pictures
that it has not seen arrive one after the other, a few a second. Printed are the times between two
tokens: medians and 99th percentiles, and what pictures make of the latter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.servers import (
    Server,
    end_cleanly_on_sigterm,
    free_port,
    streamed_chat,
    warn_if_busy,
)
from benchmarks.vision_model import data_url, first_token_s, text_part
from benchmarks.vision_pictures import render, scenes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SEED = 9_000  # of pictures that no other script draws
MOST = 1.5  # times the quiet 99th percentile


def stream(port: int, number: int, num_tokens: int, times: list[float]) -> None:
    """One text; the moments of its tokens are added to `times`."""
    body = {
        "messages": [{"role": "user", "content": f"{number}: tell a long story."}],
        "max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True,
    }  # fmt: skip
    with streamed_chat(port, body) as lines:
        times.extend(time.perf_counter() for line in lines if line.startswith(b"data: {"))


def gaps(moments: Sequence[float], *, after: float = 0.0, before: float = np.inf) -> list[float]:
    """Milliseconds between two tokens, of those that came in that time."""
    inside = [moment for moment in moments if after <= moment <= before]
    return [1e3 * float(gap) for gap in np.diff(inside)]


def round_of(
    port: int, *, first: int, streams: int, num_tokens: int, pictures: Iterator[str], every_s: float
) -> list[float]:
    """Gaps of all streams, while pictures arrive if there are any."""
    moments: list[list[float]] = [[] for _ in range(streams)]
    readers = [
        threading.Thread(target=stream, args=(port, first + i, num_tokens, moments[i]))
        for i in range(streams)
    ]
    for reader in readers:
        reader.start()
    while not all(len(times) > 8 for times in moments):  # their prompts are computed
        time.sleep(0.005)
    started = time.perf_counter()
    for picture in pictures:
        begun = time.perf_counter()
        image = {"type": "image_url", "image_url": {"url": picture}}
        first_token_s(port, [image, text_part("What colour is the square?")])
        time.sleep(max(0.0, every_s - (time.perf_counter() - begun)))
    ended = time.perf_counter()
    are_alive = all(reader.is_alive() for reader in readers)
    for reader in readers:
        reader.join()
    if ended - started < 0.01:  # nothing arrived
        return [gap for times in moments for gap in gaps(times, after=started)]
    if not are_alive:
        raise SystemExit("The streams ended before the pictures did: use more --tokens.")
    return [gap for times in moments for gap in gaps(times, after=started, before=ended)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=int, default=2, help="of text (2)")
    parser.add_argument("--pictures", type=int, default=10, help="a round (10)")
    parser.add_argument("--every-ms", type=float, default=100.0, help="a picture (100)")
    parser.add_argument("--tokens", type=int, default=400, help="of a stream (400)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    args = parser.parse_args()
    end_cleanly_on_sigterm()
    warn_if_busy()
    port = free_port()
    command = [sys.executable, "-m", "octavo.cli", "serve", str(args.folder), "--port", str(port)]
    drawn = (data_url(render(scene)) for scene in scenes(SEED))
    found: dict[str, list[float]] = {"quiet": [], "with pictures": []}
    with (
        tempfile.TemporaryDirectory() as logs,
        Server.start(command, port=port, log=Path(logs) / "log"),
    ):
        for image in islice(drawn, 2):  # starts the processes that decode pictures
            first_token_s(port, [{"type": "image_url", "image_url": {"url": image}}])
        number = 0
        for _ in range(args.rounds):
            for name, count in (("quiet", 0), ("with pictures", args.pictures)):
                found[name] += round_of(
                    port, first=number, streams=args.streams, num_tokens=args.tokens,
                    pictures=iter(list(islice(drawn, count))), every_s=args.every_ms / 1e3,
                )  # fmt: skip
                number += args.streams
    for name, times in found.items():
        print(f"{name:14} {len(times)} tokens, p50 {np.percentile(times, 50):.1f} ms, "
              f"p99 {np.percentile(times, 99):.1f} ms, longest {max(times):.1f} ms")  # fmt: skip
    quiet, beside = (float(np.percentile(found[name], 99)) for name in found)
    print(f"p99 with pictures is {beside / quiet:.2f} x the quiet one (at most {MOST})")


if __name__ == "__main__":
    main()
