"""`octavo bench steps`: what single steps cost, beside what the machine allows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.bench.report import write_json
from octavo.options.parser import CommandParser, positive
from octavo.options.settings import add_engine_options, engine_config
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from octavo.measure.study import StudySizes
    from octavo_engine.config import EngineConfig

_EPILOG = """The engine runs in this process, without HTTP. "of bandwidth" compares a step with the
least time in which this machine could read its weights and cache, "of peak" with that in which it
could multiply its numbers; the greater of the two is how near the step is to the machine's limit.
"""


def main(prog: str, argv: Sequence[str]) -> int:
    args = _make_parser(prog).parse_args(argv)
    from octavo import plotting
    from octavo.measure import roofline, study

    if args.plot is not None:
        plotting.require(args.plot)
    sizes = study.StudySizes(
        batch_sizes=args.batch_sizes,
        context_len=args.context_len,
        prompt_len=args.input_len,
        long_context_len=args.long_context_len,
        num_steps=args.num_iters,
    )
    with tempfile.TemporaryDirectory(prefix="octavo-shape-") as folder:
        found = study.measure(_config(args, Path(folder), sizes), sizes, name=args.shape)
    if args.json != "-":
        study.show(found)
    write_json(args.json, study.as_json(found))
    if args.plot is not None:
        roofline.draw(args.plot, found.limits, [study.series(found)])
    return 0


def _make_parser(prog: str) -> CommandParser:
    parser = CommandParser(prog, "Measure steps of the engine beside the limits of this machine.")
    parser.epilog = _EPILOG
    parser.add_argument(
        "--shape", metavar="SHAPE",
        help="random weights of this shape: 135m, 360m, 0.5b, 1.5b, 3b, 8b, tiny, or a config.json",
    )  # fmt: skip
    parser.add_argument(
        "--batch-sizes", type=batch_sizes, default="1,2,4,8,16,32,64", metavar="LIST",
        help="batch sizes of decode (default: 1,2,4,8,16,32,64)",
    )  # fmt: skip
    parser.add_argument(
        "--context-len", type=positive, default=128, metavar="N",
        help="tokens of each of them (default: 128)",
    )  # fmt: skip
    parser.add_argument(
        "--input-len", type=positive, default=1024, metavar="N",
        help="tokens of the prompt (default: 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--long-context-len", type=positive, metavar="N",
        help="also decode one sequence of this many tokens, such as 8000",
    )  # fmt: skip
    parser.add_argument(
        "--num-iters", type=positive, default=16, metavar="N", help="steps of each (default: 16)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE; - is stdout")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a roofline: .png, .svg or .pdf (needs matplotlib)",
    )
    add_engine_options(parser)
    return parser


def batch_sizes(text: str) -> tuple[int, ...]:
    sizes = {positive(part) for part in text.split(",")}
    return tuple(sorted(sizes))


def _config(args: argparse.Namespace, folder: Path, sizes: StudySizes) -> EngineConfig:
    """The user's settings, with room for what is measured."""
    config = engine_config(args)
    if args.shape is not None:
        if hasattr(args, "model"):
            raise ConfigError("--shape makes a model up; leave --model out")
        from octavo.measure.shapes import write_shape

        write_shape(args.shape, folder)
        config = config.replace(
            model=str(folder), served_model_names=(args.shape,), load_format="dummy"
        )
    from octavo.measure import study

    if config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"--device {config.device}: single steps are measured on auto, cpu and cuda only"
        )
    return study.roomy(config, sizes)
