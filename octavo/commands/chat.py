"""`octavo chat`: chat with a model in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.chat.terminal import ChatDialogue, parser, run
from octavo.options.vllm_flags import translate

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """Chat with a model in the terminal.

/help lists its commands. Ctrl-C stops an answer."""


def main(prog: str, argv: Sequence[str]) -> int:
    options = parser(prog, DESCRIPTION)
    options.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    args = options.parse_args(translate(argv, serving=False))
    return run(args, ChatDialogue(args.system))
