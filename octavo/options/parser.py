"""An argument parser whose errors are one sentence: forty lines of usage would hide it."""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Of one sub-command. Options are spelt out in full: a new one breaks no script."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists all there is"
        self.exit(2, f"{self.prog}: {message}; {hint}\n")


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number; got {text}") from None


def positive(text: str) -> int:
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def not_negative(text: str) -> int:
    value = whole_number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative; got {value}")
    return value
