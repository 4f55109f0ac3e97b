"""`python -m tests.hostile`: every parser of outside bytes, with counts; keeps what fails.

    python -m tests.hostile [--files N] [--seconds S] [--seed N] [PARSER...]

Each parser gets N files, or as many as S seconds allow. Ends with status 1 where one failed; its
input then lies in tests/hostile/corpus, and `make test` reads all of that again.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.hostile.hunt import PARSERS, HuntCounts, hunt

_ROW = "{:<20} {:>8} {:>8} {:>8} {:>7} {:>9} {:>9} {:>8}  {}\n"
_HEAD = ("parser", "tried", "read", "refused", "s", "slowest s", "grown MiB", "peak MiB", "")


def show(counts: HuntCounts) -> None:
    sys.stdout.write(_ROW.format(
        counts.parser, counts.tried, counts.read, counts.refused, f"{counts.seconds:.0f}",
        f"{counts.slowest_s:.3f}", f"{counts.growth_mib:.1f}", f"{counts.peak_mib:.1f}",
        f"FAILED, see {counts.kept}\n{counts.failure}" if counts.failure else "ok",
    ))  # fmt: skip
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PARSER", choices=[*PARSERS, []])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each parser at most")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n{_ROW.format(*_HEAD)}")
    num_failed = total = 0
    for name in args.names or PARSERS:
        counts = hunt(name, count=args.files, seconds=args.seconds, seed=args.seed)
        show(counts)
        num_failed += bool(counts.failure)
        total += counts.tried
    sys.stdout.write(f"{total} files, {num_failed} parsers failed\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
