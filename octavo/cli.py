"""The `octavo` command: hands each sub-command to its module, which is imported only then."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from octavo_common.core_dumps import forbid_core_dumps

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "run": "chat with a model, which is fetched if it is not here",
    "list": "list the models on this machine, or the catalogue",
    "pull": "download a model, to serve it by its name",
    "rm": "delete models from this machine",
    "ps": "show the servers on this machine",
    "show": "show what is known of a model",
    "serve": "serve a model through the OpenAI API",
    "router": "route requests to the engines that hold their prefixes",
    "up": "run replicas and router on this machine, from a cluster's YAML",
    "status": "show what octavo up runs on this machine",
    "down": "stop what octavo up runs on this machine",
    "chat": "chat with a model in the terminal",
    "complete": "let a model continue a text",
    "transcribe": "write down the speech in an audio file",
    "run-batch": "run a file of requests, without a port",
    "bench": "measure throughput, latency, or a running server",
    "operator": "run the operator that reconciles LLMDeployments",
    "quantize": "write a model with 8- or 4-bit weights",
    "fetch": "download a model's files into a folder",
    "bundle": "pack images, chart and models into one file, and load it without the internet",
    "doctor": "check what this machine supports and what is missing",
}

EXAMPLES = (
    "octavo run smollm2              chat in this terminal",
    "octavo serve demo://smollm2     answer at http://localhost:8000/v1, with a page at /",
)

EXIT_MODEL = 1  # the model's files cannot be used, or the server is not there
EXIT_SETTINGS = 2  # as argparse's own
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for models and servers that do not work, 2 for settings that cannot."""
    forbid_core_dumps()
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] not in COMMANDS:
        return _overview(argv)
    name, rest = argv[0], argv[1:]
    module = import_module(f"octavo.commands.{name.replace('-', '_')}")
    return _guarded(module.main, f"octavo {name}", rest)


def _overview(argv: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="octavo",
        usage="octavo COMMAND [options]",
        description="Serve large language models.\n\nexamples:\n  " + "\n  ".join(EXAMPLES),
        epilog="commands:\n" + "\n".join(lines) + "\n\nRun octavo COMMAND --help for details.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args(argv)
    if args.version:
        from octavo_engine import __version__

        print(f"octavo {__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    from difflib import get_close_matches

    near = get_close_matches(args.command, COMMANDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    print(f"octavo: there is no command {args.command}; {hint}", file=sys.stderr)
    return EXIT_SETTINGS


def _guarded(run: _Run, prog: str, argv: Sequence[str]) -> int:
    """Errors that users can fix are printed as one sentence, not as a traceback."""
    try:
        return run(prog, argv)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        sys.stderr.close()
        return 0
    except Exception as error:
        from octavo_engine.errors import ConfigError, OctavoError, machine_fault

        if problem := machine_fault(error):
            print(f"octavo: {problem}", file=sys.stderr)
            return EXIT_SETTINGS
        if not isinstance(error, OctavoError):
            raise
        print(f"octavo: {error}", file=sys.stderr)
        return EXIT_SETTINGS if isinstance(error, ConfigError) else EXIT_MODEL


if TYPE_CHECKING:
    from collections.abc import Callable

    _Run = Callable[[str, Sequence[str]], int]


if __name__ == "__main__":
    sys.exit(main())
