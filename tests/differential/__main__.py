"""`make fuzz`: made-up requests whose answers must not depend on how they came about.

Stops at the first difference; the seed it prints begins with the round that found it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time

from tests.differential import company, streams
from tests.differential.bodies import SPEAKERS
from tests.differential.models import any_real_model, any_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--only", choices=("company", "streams"), help="one of the two parts")
    parser.add_argument("--real", action="store_true", help="SmolLM2 instead of tiny models")
    parser.add_argument("--speaker", default="", choices=("", *SPEAKERS), help="of streams")
    args = parser.parse_args()
    ends_at = time.monotonic() + args.seconds
    counts = {"in company": 0, "streamed": 0, "resumed": 0, "refused": 0}
    for seed in itertools.count(args.seed):
        if time.monotonic() > ends_at:
            sys.stdout.write(f"clean: {counts}\n")
            return 0
        sys.stdout.write(f"seed {seed}\n")
        sys.stdout.flush()
        rng = random.Random(seed)
        if args.only != "streams":
            model = any_real_model(rng) if args.real else any_tiny_model(rng)
            counts["in company"] += company.compare(model, rng, num_engines=3)
        if args.only != "company":
            count = streams.compare(rng, num_bodies=12, num_cuts=5, speaker=args.speaker)
            counts["streamed"] += count.answers
            counts["resumed"] += count.resumes
            counts["refused"] += count.refusals
    raise AssertionError("count never ends")


if __name__ == "__main__":
    sys.exit(main())
