"""`octavo chat`: chat with a model in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.chat.terminal import ChatDialogue, add_chat_options, parser, run
from octavo.options.vllm_flags import translate

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """Chat with a model in the terminal.

/help lists its commands. Ctrl-C stops an answer."""


def main(prog: str, argv: Sequence[str]) -> int:
    options = parser(prog, DESCRIPTION)
    add_chat_options(options)
    args = options.parse_args(translate(argv, serving=False))
    return run(args, ChatDialogue(args.system, args.image))
