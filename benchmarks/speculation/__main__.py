"""Heads that draft for a model, trained on this machine's CPU on what the model itself writes, and
what every kind of speculation gains.

    python -m benchmarks.speculation train eagle3 HEAD [--model MODEL]    (needs torch)
    python -m benchmarks.speculation train medusa HEADS [--model MODEL]
    python -m benchmarks.speculation measure [--method ngram] [--method eagle3=HEAD] …
    python -m benchmarks.speculation peers [--method ngram] …    (after benchmarks/peers/setup.sh)

`train` has the model answer requests (made up by itself and from a list: chat, code, JSON,
summaries; or --questions, one a line), takes the states behind each token, fits the head to the
tokens that came next, and writes it in the form that `octavo serve` and vLLM read:

    octavo serve MODEL --speculative-config '{"method": "eagle3", "model": "HEAD"}'

It prints how often each drafted token is right on answers that it was not trained on, and the
acceptance length: tokens of a step if all are drafted. Answers are kept in a file: one that exists
is used, so that several heads can learn from the same answers, and what was interrupted goes on.

`measure` answers the same requests with and without speculation, in turn, at several numbers of
streams, checks that the answers are equal, and prints the gain. `peers` does so over HTTP, with one
stream, for Octavo, vLLM's CPU build and llama.cpp's server. What was measured is kept in --out, so
that both can be interrupted; `--print-only` prints the table of what there is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.contenders import FOLDER
from benchmarks.speculation.prompts import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands.add_parser("train", help="train a head"))
    _add_measure(commands.add_parser("measure", help="measure the gain"))
    _add_peers(commands.add_parser("peers", help="beside vLLM's and llama.cpp's"))
    return parser.parse_args(argv)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", choices=("eagle3", "medusa"))
    parser.add_argument("folder", type=Path, help="of the head's files")
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--answers", type=Path, help="file; default: answers.jsonl in the folder")
    parser.add_argument("--questions", type=Path, help="a file with one a line")
    parser.add_argument("--count", type=int, default=2000, help="answers")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--depth", type=int, default=3, help="draft tokens that are learned")
    parser.add_argument("--tokens", type=int, default=8192, help="the most common ones: drafted")
    parser.add_argument("--epochs", type=int, default=6, help="at most")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="of an eagle3 head's fit, at most"
    )
    parser.add_argument(
        "--activation-bits", type=int, default=16, choices=(8, 16),
        help="8: answers and states of a quantised model in a third of the time",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=16, help="answers in a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="default: all")


def _add_measure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument(
        "--method", action="append", help="ngram, suffix, or METHOD=FOLDER; default: ngram, suffix"
    )
    parser.add_argument("--weights", default="auto", help="of the model: auto, none (bf16), …")
    parser.add_argument("--quantization", default="auto", help="of draft models and heads")
    parser.add_argument("--streams", type=int, action="append", help="default: 1, 4, 16, 64")
    parser.add_argument("--threads", type=int, help="default: all")
    _add_common(parser, "speculation.jsonl", pairs=3)


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method", action="append",
        help="of Octavo and vLLM: ngram, or METHOD=FOLDER; default: ngram",
    )  # fmt: skip
    parser.add_argument("--only", metavar="NAMES", help="parts of names, separated by commas")
    parser.add_argument(
        "--peers", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}"
    )
    _add_common(parser, "speculation-peers.jsonl", pairs=2)


def _add_common(parser: argparse.ArgumentParser, out: str, *, pairs: int) -> None:
    parser.add_argument("--draft-tokens", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: all")
    parser.add_argument("--requests", type=int, default=4, help="in turn, of each stream")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--pairs",
        type=int,
        default=pairs,
        help="of runs without and with; from 8 streams on one fewer",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="then stop; run it again")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out") / out)
    parser.add_argument("--print-only", action="store_true")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.command == "train":
        try:
            from benchmarks.speculation.training import train
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise SystemExit("Training needs torch: pip install torch") from None
        train(args)
    elif args.command == "measure":
        from benchmarks.speculation.measure import measure

        measure(args)
    else:
        from benchmarks.servers import end_cleanly_on_sigterm
        from benchmarks.speculation.peers import compare

        end_cleanly_on_sigterm()
        compare(args)


if __name__ == "__main__":
    main()
