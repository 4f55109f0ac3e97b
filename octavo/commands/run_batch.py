"""`octavo run-batch`: a file of requests through an engine of its own, without a port."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import IO, TYPE_CHECKING

from octavo.batch.files import count_lines, earlier, opened_input, opened_output
from octavo.batch.remote import is_remote, local_input, local_output
from octavo.options.parser import CommandParser, positive
from octavo.options.settings import add_engine_options, engine_config
from octavo.options.vllm_flags import translate
from octavo_engine.errors import ConfigError
from octavo_engine.server.openai.batches.lines import LineReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from octavo_engine.config import EngineConfig
    from octavo_engine.server.openai.batches.lines import BadLine, BatchTask
    from octavo_engine.server.openai.batches.run import BatchTally

DESCRIPTION = """Run a file of requests in OpenAI's batch format, one JSON object per line.

Answers come in the order of the requests. The exit code is 0 when all have status 200, and 1 when
some failed; their lines say why."""
_NOTE_S = 10.0  # between lines of progress where there is no terminal


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, DESCRIPTION)
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="input file of requests; - for standard input; http(s) URLs are fetched",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="output file; - for standard output; http(s) URLs are written by PUT",
    )
    parser.add_argument(
        "--concurrency", type=positive, default=256, metavar="N", help="requests at once (256)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--resume", action="store_true", help="resume: skip requests that have a response"
    )
    how.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    add_engine_options(parser)
    args = parser.parse_args(translate(argv, serving=False))
    config = engine_config(args)
    if args.resume and is_remote(args.output_file):
        raise ConfigError("--resume needs an --output-file on this disk to go on with")
    with local_input(args.input_file) as questions, local_output(args.output_file) as answers:
        done = earlier(answers, resume=args.resume, overwrite=args.overwrite)
        total = count_lines(questions)
        with (
            opened_input(questions) as source,
            opened_output(answers, resume=args.resume) as target,
        ):
            progress = BatchProgress(
                None if total is None else total - len(done.ids) - len(done.lines)
            )
            entries = LineReader(done).read(source)
            tally = asyncio.run(_run(config, entries, target, args.concurrency, progress))
    progress.end(tally)
    return 1 if tally.failed else 0


async def _run(
    config: EngineConfig,
    entries: Iterator[BatchTask | BadLine],
    target: IO[bytes],
    concurrency: int,
    progress: BatchProgress,
) -> BatchTally:
    from octavo_common.logs import set_up_logging
    from octavo_engine.core.async_engine import AsyncEngine
    from octavo_engine.server.app import build_app
    from octavo_engine.server.openai.batches.run import run
    from octavo_engine.server.settings import ServerSettings

    set_up_logging("text", "warning")

    def write(line: bytes, is_good: bool) -> None:
        target.write(line)
        target.flush()  # what is answered stays answered, whatever happens next

    engine = await AsyncEngine.start(config)
    try:
        await engine.ready()
        app = build_app(engine, ServerSettings(access_log="none"))
        return await run(app, entries, write, concurrency=concurrency, note=progress.note)
    finally:
        await engine.stop()


class BatchProgress:
    """Shows progress on standard error: one line that changes, or a line now and then."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._is_terminal = sys.stderr.isatty()
        self._noted_at = time.monotonic()

    def note(self, tally: BatchTally) -> None:
        now = time.monotonic()
        if now - self._noted_at < (0.1 if self._is_terminal else _NOTE_S):
            return
        self._noted_at = now
        of = "" if self._total is None else f" of {self._total}"
        failed = f", {tally.failed} failed" if tally.failed else ""
        text = f"{tally.done}{of} done{failed}"
        if self._is_terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr)

    def end(self, tally: BatchTally) -> None:
        begin = "\r\033[K" if self._is_terminal else ""
        failed = f", {tally.failed} failed" if tally.failed else ""
        print(f"{begin}{tally.answered} answered{failed}", file=sys.stderr)
