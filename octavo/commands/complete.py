"""`octavo complete`: let a model continue a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.chat.terminal import CompletionDialogue, parser, run
from octavo.options.vllm_flags import translate

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """Let a model continue a text, without a chat template.

/exit ends; Ctrl-C stops an answer."""


def main(prog: str, argv: Sequence[str]) -> int:
    return run(
        parser(prog, DESCRIPTION).parse_args(translate(argv, serving=False)), CompletionDialogue()
    )
