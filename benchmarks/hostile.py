"""What a quiet client notices while others send hostile bodies, and the memory that is left.

    python -m benchmarks.hostile [--json] [--model demo://smollm2] [--seconds 12]

One engine, as `octavo serve` starts it. A client asks for short answers, one after the other: alone
first, then beside one that sends a hostile body every second, or as soon as the last is answered,
kind by kind. A request's figure is the time to its whole answer; memory is that of the API process,
for the core's is taken at the start. Goals: p99 beside hostile bodies is at most twice the quiet
one; memory is back within 10 % afterwards. Where cores are scarce and busy with other things the
ratios tell more than the times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.servers import Server
from octavo_engine.server.http.listen import open_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TWICE = 2.0
LEFT = 1.1  # of the memory before
SETTLE_S = 3.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUIET = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of each kind, all within the default limit of 8 MiB."""

    def body(**fields: Any) -> bytes:
        return json.dumps({"max_tokens": 1, **fields}).encode()

    chain = "".join(f'rule_number_{i} ::= "a" rule_number_{i + 1}\n' for i in range(5000))
    digits = "1" * 7_000_000
    return {
        "400 kB of words": (COMPLETIONS, body(prompt="hello world and more " * 20_000)),
        "2 MB of digits": (COMPLETIONS, body(prompt=digits[:2_000_000])),
        "7 MB of digits": (COMPLETIONS, body(prompt=digits)),
        "7 MB in a chat": (CHAT, body(messages=[{"role": "user", "content": digits}])),
        "2 MB to tokenize": ("/tokenize", body(prompt=digits[:2_000_000])),
        "2 MB to cut": (COMPLETIONS, body(prompt=digits[:2_000_000], truncate_prompt_tokens=9)),
        "65,000 bad words": (COMPLETIONS, body(prompt="a", bad_words=["word"] * 65_000)),
        "30 long bad words": (COMPLETIONS, body(prompt="a", bad_words=["word " * 24_000] * 30)),
        "2,000,000 objects": (COMPLETIONS, b'{"prompt":"a","x":[' + b"{}," * 2_000_000 + b"1]}"),
        "1,000,000 values": (COMPLETIONS, b'{"prompt":[' + b"1," * 1_000_000 + b"1]}"),
        "5,000 rules": (
            COMPLETIONS,
            body(prompt="a", structured_outputs={"grammar": f"root ::= rule_number_0\n{chain}"}),
        ),
        "1,024 prompts": (COMPLETIONS, body(prompt=["Tell me a story."] * 1024, max_tokens=16)),
    }  # fmt: skip


def ask(url: str, body: bytes) -> int:
    """The status."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def times(url: str, go_on: Callable[[], bool]) -> list[float]:
    """Of the quiet client's requests, in seconds."""
    found: list[float] = []
    body = json.dumps(QUIET).encode()
    while go_on() or len(found) < 5:
        began = time.perf_counter()
        if ask(url + COMPLETIONS, body) != 200:
            raise SystemExit("the quiet client was refused")
        found.append(time.perf_counter() - began)
    return found


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def beside(url: str, path: str, body: bytes, seconds: float, every: float) -> dict[str, Any]:
    """The quiet client's times while that body is sent again and again, three times at least."""
    ends_at = time.perf_counter() + seconds
    answers: list[tuple[int, float]] = []
    done = threading.Event()

    def send() -> None:
        while time.perf_counter() < ends_at or len(answers) < 3:
            began = time.perf_counter()
            status = ask(url + path, body)
            answers.append((status, time.perf_counter() - began))
            time.sleep(max(0.0, began + every - time.perf_counter()))
        done.set()

    sender = threading.Thread(target=send)
    sender.start()
    found = times(url, lambda: not done.is_set())
    sender.join()
    return {
        "status": answers[0][0],
        "answered_s": quantile([took for _, took in answers], 0.5),
        "p50_s": quantile(found, 0.5),
        "p99_s": quantile(found, 0.99),
    }


def measure(model: str, seconds: float, every: float, only: str) -> dict[str, Any]:
    with open_port("127.0.0.1", 0) as listener:
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "octavo.cli", "serve", model, "--port", str(port)]
    log = Path(tempfile.mkdtemp()) / "server.log"
    with Server.start(command, port=port, log=log, ready="/ready") as server:
        times(server.url, lambda: False)
        ends_at = time.perf_counter() + seconds
        quiet = times(server.url, lambda: time.perf_counter() < ends_at)
        before = anonymous_bytes(server.process.pid)
        kinds = {
            name: beside(server.url, path, body, seconds, every)
            for name, (path, body) in bodies().items()
            if only in name
        }
        time.sleep(SETTLE_S)
        after = anonymous_bytes(server.process.pid)
    return {
        "quiet": {"p50_s": quantile(quiet, 0.5), "p99_s": quantile(quiet, 0.99)},
        "kinds": kinds,
        "memory": {"before": before, "after": after},
    }


def show(found: Mapping[str, Any]) -> None:
    quiet = found["quiet"]
    print(f"{'':20} {'status':>6} {'answered':>9} {'p50':>8} {'p99':>8}   p99, times quiet")
    print(f"{'quiet':20} {'':6} {'':9} {quiet['p50_s'] * 1e3:6.0f}ms {quiet['p99_s'] * 1e3:6.0f}ms")
    for name, kind in found["kinds"].items():
        ratio = kind["p99_s"] / quiet["p99_s"]
        verdict = "" if ratio <= TWICE else "   above the goal"
        print(
            f"{name:20} {kind['status']:6} {kind['answered_s'] * 1e3:7.0f}ms "
            f"{kind['p50_s'] * 1e3:6.0f}ms {kind['p99_s'] * 1e3:6.0f}ms   {ratio:.2f}{verdict}"
        )
    memory = found["memory"]
    ratio = memory["after"] / memory["before"]
    verdict = "" if ratio <= LEFT else "   above the goal"
    before, after = memory["before"] >> 20, memory["after"] >> 20
    print(f"memory {before} MiB, afterwards {after}: {ratio:.2f}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each kind")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between hostile bodies")
    parser.add_argument("--only", default="", help="kinds with this in their name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.model, args.seconds, args.every, args.only)
    if args.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
