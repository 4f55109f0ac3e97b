"""`octavo bench`: steps, throughput, latency, serve, router; each in its own module."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser, positive

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from octavo_engine.config import EngineConfig

KINDS = {
    "steps": "single steps beside this machine's limits: a batch of 1 to 64, a prompt",
    "throughput": "many prompts at once, offline: tokens per second",
    "latency": "one batch again and again, offline: seconds per batch",
    "serve": "a running server, as clients see it: time to first token, between tokens, in all",
    "router": "routing policies side by side, on simulated engines in virtual time",
}


def main(prog: str, argv: Sequence[str]) -> int:
    if argv and argv[0] in KINDS:
        module = import_module(f"octavo.commands.bench_{argv[0]}")
        code: int = module.main(f"{prog} {argv[0]}", argv[1:])
        return code
    if any(word.partition("=")[0] == "--shape" for word in argv):  # only steps are measured of one
        return main(prog, ["steps", *argv])
    parser = CommandParser(prog, "Run a benchmark.")
    parser.epilog = "\n".join(f"  {name:<10}  {text}" for name, text in KINDS.items())
    parser.add_argument("kind", choices=KINDS, metavar="KIND")
    parser.parse_args(argv)  # an unknown kind, or --help: ends here
    return 2


def add_size_options(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    """The shape of the work, under vLLM's names."""
    parser.add_argument(
        "--input-len", "--random-input-len", type=positive, default=input_len, metavar="N",
        help=f"tokens of each prompt (default: {input_len})",
    )  # fmt: skip
    parser.add_argument(
        "--output-len", "--random-output-len", type=positive, default=output_len, metavar="N",
        help=f"tokens of each answer (default: {output_len})",
    )  # fmt: skip
    parser.add_argument(
        "--dataset-name", choices=("random",), default="random", help="prompts of random token ids"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE; - is stdout")


def add_profile_option(parser: argparse.ArgumentParser) -> None:
    """For benchmarks whose engine is in this process."""
    parser.add_argument(
        "--profile", metavar="FILE", help="record every step to FILE, for ui.perfetto.dev"
    )


def with_engine(
    parser: CommandParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, EngineConfig]:
    """The arguments of a benchmark whose engine is in this process, and the engine's settings."""
    from octavo.options.settings import add_engine_options, engine_config
    from octavo.options.vllm_flags import translate

    add_profile_option(parser)
    add_engine_options(parser)
    args = parser.parse_args(translate(argv, serving=False))
    config = engine_config(args)
    from octavo_engine.core.device_choice import settle_device

    return args, settle_device(config)
