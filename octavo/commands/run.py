"""`octavo run`: fetch a model if it is not here, and chat with it in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.chat.terminal import ChatDialogue, add_chat_options, parser, run
from octavo.options.vllm_flags import translate
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DESCRIPTION = """Chat with a model, which is fetched first if it is not on this machine.

With a PROMPT, or text on stdin, the answer alone is printed."""


def main(prog: str, argv: Sequence[str]) -> int:
    options = parser(prog, DESCRIPTION, is_remote=False)
    options.add_argument("words", metavar="PROMPT", nargs="*", help="what to answer; - reads stdin")
    add_chat_options(options)
    args = options.parse_intermixed_args(translate(argv, serving=False))
    args.url = None
    args.prompt = _prompt(args)
    dialogue = ChatDialogue(args.system, args.image)
    if (code := _fetch(args.model_positional or getattr(args, "model", None))) != 0:
        return code
    return run(args, dialogue)


def _prompt(args: argparse.Namespace) -> str | None:
    """None: a conversation."""
    words = " ".join(args.words)
    if args.prompt is not None and words:
        raise ConfigError("the prompt is given twice: as --prompt and after the model")
    if args.prompt is None and not words:
        return None if sys.stdin.isatty() else "-"
    return args.prompt if args.prompt is not None else words


def _fetch(model: str | None) -> int:
    """An exit code. Raises ConfigError."""
    from octavo.commands.pull import pull_model
    from octavo.fetch.errors import EXIT_CODES, FetchError
    from octavo.local.home import Home
    from octavo.models.catalogue import CHAT
    from octavo.models.library import ModelLibrary, parse_model_name

    if model is None:
        raise ConfigError("name a MODEL; octavo list --all shows the catalogue")
    if Path(model).expanduser().exists() or model.startswith("file://"):
        return 0
    name = parse_model_name(model)
    if name.entry is not None and name.entry.kind != CHAT:
        raise ConfigError(
            f"{name.name} is a model for {name.entry.kind}s, not for chat; serve it with "
            f"octavo serve {name.name}"
        )
    try:
        pull_model(ModelLibrary(Home.find(os.environ)), name)
    except FetchError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return EXIT_CODES[error.reason]
    return 0
