"""Searches one parser in a child process: mutated inputs, with bounds on time and memory.

    python -m tests.hostile.hunt NAME --count N --seconds S --seed N --folder FOLDER

The input under way is in FOLDER/current, also where the process dies of it. Prints what it counted
as JSON; ends with 1 and a traceback where an input raised what is no refusal of the parser's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.hostile.files import FILES
from tests.hostile.mutations import mutated
from tests.hostile.wires import WIRES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.hostile.parser import HostileParser

PARSERS: Final[dict[str, HostileParser]] = {**FILES, **WIRES}
CORPUS: Final = Path(__file__).parent / "corpus"  # PARSER/DIGEST: inputs that once failed
_PROGRAM: Final = ("-m", "tests.hostile.hunt")
_CPU_S: Final = 10.0  # of one input, on any machine
_WALL_S: Final = 120.0
_ADDRESS_SPACE: Final = 3 << 30  # that may be added: a length that is believed fails here
_SETTLED: Final = 300  # inputs, after which memory is measured
_PAGE_KIB: Final = resource.getpagesize() // 1024


@dataclass(slots=True)
class HuntCounts:
    """What one child saw."""

    parser: str
    tried: int = 0
    read: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    growth_mib: float = 0.0
    peak_mib: float = 0.0
    failure: str = ""
    kept: str = ""  # where the input that failed lies


def kept_inputs(name: str) -> list[Path]:
    folder = CORPUS / name.replace(" ", "-").replace("/", "-")
    return sorted(folder.glob("*")) if folder.is_dir() else []


def search(name: str, *, count: int, seconds: float, seed: int, folder: Path) -> HuntCounts:
    """In this process. Raises what an input makes the parser raise."""
    logging.disable(logging.CRITICAL)
    parser, counts, rng = PARSERS[name], HuntCounts(name), random.Random(seed)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    read, seeds, refusals = parser.open(work)
    seeds = [*seeds, *(path.read_bytes() for path in kept_inputs(name))]
    current = folder / "current"
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + _ADDRESS_SPACE, hard))
    before = first_peak = 0
    began_at = time.monotonic()
    while counts.tried < count and time.monotonic() - began_at < seconds:
        at = counts.tried
        data = seeds[at] if at < len(seeds) else mutated(
            rng, seeds, parser.words, json_share=parser.json_share
        )  # fmt: skip
        if at == _SETTLED:
            before, first_peak = _resident_kib(), _peak_kib()
        current.write_bytes(data)
        _limit_time(_CPU_S)
        started_at = time.process_time()
        try:
            is_read = read(data) is not False
        except refusals:
            is_read = False
        counts.slowest_s = max(counts.slowest_s, time.process_time() - started_at)
        counts.tried += 1
        counts.read += is_read
        counts.refused += not is_read
    _limit_time(0.0)
    counts.seconds = time.monotonic() - began_at
    if before:
        gc.collect()
        counts.growth_mib = (_resident_kib() - before) / 1024
        counts.peak_mib = (_peak_kib() - first_peak) / 1024
        assert counts.growth_mib <= parser.growth_mib, counts
        assert counts.peak_mib <= parser.peak_mib, counts
    return counts


def _limit_time(cpu_s: float) -> None:
    """Past it the process ends by a signal, native code included. Zero: no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, _WALL_S if cpu_s else 0.0)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KIB


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def hunt(
    name: str, *, count: int, seconds: float, seed: int, program: Sequence[str] = _PROGRAM
) -> HuntCounts:
    """In a child process; an input that fails is kept in the corpus."""
    fast = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as folder:
        command = [
            sys.executable, *program, name, "--count", str(count), "--seconds",
            str(seconds), "--seed", str(seed), "--folder", folder,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return HuntCounts(**json.loads(done.stdout.splitlines()[-1]))
        failed = HuntCounts(name, failure=_how(done))
        current = Path(folder) / "current"
        if current.exists():
            data = current.read_bytes()
            kept = CORPUS / name.replace(" ", "-").replace("/", "-")
            kept.mkdir(parents=True, exist_ok=True)
            path = kept / sha256(data).hexdigest()[:16]
            path.write_bytes(data)
            failed.kept = str(path)
        return failed


def _how(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        number = -done.returncode
        how = "hangs" if number in (signal.SIGPROF, signal.SIGALRM) else "crashes"
        return f"{how}: {signal.Signals(number).name}\n{done.stderr[-1500:]}"
    return done.stderr[-3000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARSERS)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    # Ends the process where nothing else would: the parent says which input it was.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    counts = search(
        args.name, count=args.count, seconds=args.seconds, seed=args.seed, folder=args.folder
    )
    sys.stdout.write(json.dumps(asdict(counts)) + "\n")


if __name__ == "__main__":
    main()
