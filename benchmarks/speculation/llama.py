"""llama.cpp's server with and without speculation, on the same requests, one stream."""

from __future__ import annotations

import json
import shlex
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.servers import NotReady, Server, free_port
from benchmarks.speculation.answers import MAX_LEN
from benchmarks.speculation.figures import Cell, Run
from benchmarks.speculation.measure import cells_of, measure_cell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benchmarks.speculation.figures import Figures
    from benchmarks.speculation.prompts import Request
    from octavo import SamplingParams

WITHIN_S = 600.0  # of one answer
_LOGS = Path("benchmarks/out")


class LlamaServer:
    """One that is running."""

    def __init__(self, url: str) -> None:
        self._url = url

    def answer(
        self, batch: Sequence[Request], params: Sequence[SamplingParams], _streams: int
    ) -> Run:
        """One at a time. Its own account of the seconds: those of prompts are left out."""
        found = [self._one(*both) for both in zip(batch, params, strict=True)]
        num_tokens = sum(one["predicted_n"] for one in found)
        num_accepted = sum(one.get("draft_n_accepted", 0) for one in found)
        has_drafts = any(one.get("draft_n") for one in found)
        num_steps = num_tokens - num_accepted
        return Run(
            sum(one["predicted_ms"] for one in found) / 1000,
            None,
            num_tokens,
            num_steps,
            num_steps if has_drafts else 0,  # it does not count those without drafts apart
            num_accepted,
            [],  # its tokens may differ: its bits depend on the batch
        )

    def _one(self, request: Request, params: SamplingParams) -> dict[str, Any]:
        path, body = body_of(request, params)
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        sent = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(sent, timeout=WITHIN_S) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"llama-server refused a request: {error.read(300)!r}") from None
        timings: dict[str, Any] | None = answer.get("timings")
        if timings is None:
            raise SystemExit("llama-server reported no timings: use a version of 2025 or later")
        return timings


def body_of(request: Request, params: SamplingParams) -> tuple[str, dict[str, Any]]:
    """Path and body, by llama-server's names."""
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "seed": params.seed,
        "cache_prompt": False,
    }
    if request.token_ids:
        whole = {"prompt": list(request.token_ids), "n_predict": params.max_tokens}
        return "/completion", body | whole
    body |= {
        "messages": [{"role": "user", "content": request.content}],
        "max_tokens": params.max_tokens,
    }
    if request.schema is not None:
        schema = {"name": "answer", "schema": request.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return "/v1/chat/completions", body


def command_of(args: argparse.Namespace, port: int, extra: Sequence[str]) -> list[str]:
    threads = () if args.threads is None else ("-t", str(args.threads))
    return [
        str(args.llama_server), "-m", str(args.gguf), "--host", "127.0.0.1", "--port", str(port),
        "-c", str(MAX_LEN), "-np", "1", "-ngl", "0", *threads, *extra,
    ]  # fmt: skip


def measure_llama(
    args: argparse.Namespace, figures: Figures, vocab_size: int, until: float
) -> None:
    """Raises SystemExit where it cannot be started."""
    if args.gguf is None or not args.llama_args:
        raise SystemExit("--llama-server also needs --gguf and --llama-args, those of speculation")
    name = f"llama.cpp {args.llama_args}"
    cells = [cell for cell in cells_of(name, args) if cell.streams == 1]
    cells = [
        Cell(*cell[:3], json.dumps({"model": str(args.gguf), **_rest(cell)})) for cell in cells
    ]
    missing = [cell for cell in cells if figures.count(cell) < args.pairs]
    if not missing:
        return
    with ExitStack() as running:
        servers = []
        for number, extra in enumerate(((), shlex.split(args.llama_args))):
            port = free_port()
            log = _LOGS / f"llama-{number}.log"
            try:
                server = Server.start(command_of(args, port, extra), port=port, log=log)
            except NotReady as error:
                raise SystemExit(f"{args.llama_server}: {error}") from None
            servers.append(LlamaServer(running.enter_context(server).url))
        plain, drafted = servers
        for cell in missing:
            measure_cell(cell, (plain, drafted), args, figures, vocab_size, until)


def _rest(cell: Cell) -> dict[str, Any]:
    """Of its settings those that concern another's server, too."""
    names = ("requests", "max_tokens", "temperature", "threads")
    settings = json.loads(cell.settings)
    return {name: settings[name] for name in names}
