"""What a picture adds to the steps of others, in processor time: what else the machine does is no
part of it, unlike in benchmarks.pictures_beside.

    python -m benchmarks.vision_model train FOLDER      (once)
    python -m benchmarks.picture_steps FOLDER [--streams 2] [--pictures 10]

An engine of one thread computes streams of text alone, and then while pictures that it has not seen
arrive one after the other. Printed are medians and 99th percentiles of its steps, and how many
steps a picture waits for its first token.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.vision_pictures import render, scenes
from octavo_engine.config import EngineConfig
from octavo_engine.core.build import build_engine
from octavo_engine.core.media.prepare import prepare_decoded
from octavo_engine.core.media.spec import read_picture_spec
from octavo_engine.state.media import MediaSpan
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from PIL.Image import Image

    from octavo_engine.core.engine import Engine
    from octavo_engine.core.media.spec import PictureSpec

SEED = 9_000  # of pictures that no other script draws
MOST = 1.5  # times the quiet 99th percentile
NUM_BEFORE, NUM_BEHIND = 3, 15  # tokens of text around a picture
BETWEEN = 5  # steps without pictures after each


def text(seed: int, count: int) -> list[int]:
    return [random.Random(seed).randrange(100, 40_000) for _ in range(count)]


def request(name: str, tokens: list[int], max_tokens: int, **media: Any) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, **media)


def with_picture(name: str, image: Image, spec: PictureSpec) -> EngineRequest:
    (item,) = prepare_decoded(image, spec).tiles
    num_rows = spec.media.rows_of(item)
    tokens = [*text(0, NUM_BEFORE), *[spec.media.token_id] * num_rows, *text(1, NUM_BEHIND)]
    span = MediaSpan(item.digest, NUM_BEFORE, num_rows)
    return request(name, tokens, 1, media=(span,), media_items=(item,))


def step(engine: Engine, awaited: str = "") -> tuple[float, bool]:
    """Milliseconds of processor time, and whether that request ended."""
    started = time.process_time()
    outputs = engine.step().outputs
    took = 1e3 * (time.process_time() - started)
    return took, any(o.request_id == awaited and o.finish_reason for o in outputs)


def beside(engine: Engine, pictures: list[EngineRequest]) -> tuple[list[float], list[int]]:
    """Times of steps, and steps that each picture waited."""
    times, waits = [], []
    for each in pictures:
        engine.add(each)
        is_done, wait = False, 0
        while not is_done:
            took, is_done = step(engine, each.request_id)
            times.append(took)
            wait += 1
        waits.append(wait)
        times += [step(engine)[0] for _ in range(BETWEEN)]
    return times, waits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=int, default=2, help="of text (2)")
    parser.add_argument("--pictures", type=int, default=10, help="(10)")
    parser.add_argument("--steps", type=int, default=200, help="of text alone (200)")
    args = parser.parse_args()
    spec = read_picture_spec(resolve_model(str(args.folder)))
    if spec is None:
        sys.exit(f"{args.folder} is no model that sees")
    config = EngineConfig(model=str(args.folder), num_threads=1, max_model_len=1024)
    engine, _ = build_engine(config)
    drawn = (render(scene) for scene in scenes(SEED))
    first, *pictures = (
        with_picture(f"picture {number}", image, spec)
        for number, image in enumerate(islice(drawn, 1 + args.pictures))
    )
    engine.add(first)
    while engine.has_work:
        engine.step()
    for number in range(args.streams):
        engine.add(request(f"text {number}", text(number + 2, 20), 900))
    for _ in range(30):
        engine.step()
    quiet = [step(engine)[0] for _ in range(args.steps)]
    times, waits = beside(engine, pictures)
    for name, values in (("quiet", quiet), ("with pictures", times)):
        print(f"{name:14} {len(values)} steps, p50 {np.percentile(values, 50):.1f} ms, "
              f"p99 {np.percentile(values, 99):.1f} ms, longest {max(values):.1f} ms")  # fmt: skip
    ratio = np.percentile(times, 99) / np.percentile(quiet, 99)
    print(f"p99 with pictures is {ratio:.2f} x the quiet one (at most {MOST}); "
          f"a picture waits {np.median(waits):.0f} steps")  # fmt: skip
    engine.close()


if __name__ == "__main__":
    main()
