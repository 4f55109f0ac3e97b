"""`octavo quantize`: a model's weights as 8- or 4-bit integers, in a folder of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence

BITS = {"int8": 8, "int4": 4}


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog,
        "Write a model of safetensors with 8- or 4-bit weights, as compressed-tensors.\n"
        "`octavo serve FOLDER` then computes from the integers.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder, hf://ORG/NAME[@REV] or ORG/NAME")
    parser.add_argument("--to", choices=tuple(BITS), required=True, help="bits of a weight")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    args = parser.parse_args(argv)

    from octavo_engine.weights.quantize import quantize_folder
    from octavo_engine.weights.source import resolve_model

    files = resolve_model(args.model, revision=args.revision)
    quantize_folder(files, BITS[args.to], args.output, _show if sys.stderr.isatty() else None)
    size = sum(path.stat().st_size for path in args.output.iterdir())
    print(f"{args.output}: {args.to}, {size / 1e6:.1f} MB")
    return 0


def _show(done: int, total: int) -> None:
    print(f"\r{done} of {total} tensors", end="\n" if done == total else "", file=sys.stderr)
