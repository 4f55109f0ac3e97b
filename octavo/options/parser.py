"""An argument parser whose errors are one sentence: forty lines of usage would hide it."""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.options.help import HELP
from octavo_common.faults import join_faults

if TYPE_CHECKING:
    from collections.abc import Sequence

_VARIABLE = re.compile(r" \[OCTAVO_[A-Z0-9_]+\]$")


class CommandParser(argparse.ArgumentParser):
    """Of one sub-command. Options are spelt out in full: a new one breaks no script."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._faults: list[str] = []  # of values: all are reported at once
        self._help = HELP.get(prog.removeprefix("octavo "))
        if self._help is not None:
            examples = "".join(f"\n  {example}" for example in self._help.examples)
            self.description = f"{description}\n\nexamples:{examples}"
        has_more = bool(self._help and self._help.common)
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?", metavar="all",
            help="show this, or with --help=all every option" if has_more else "show this",
        )  # fmt: skip

    def show_help(self, *, is_whole: bool) -> None:
        """The whole of it, or what most people need. Changes the parser: the program ends next."""
        common = self._help.common if self._help is not None else frozenset[str]()
        if common:
            words = [f"[{action.metavar}]" for action in self._actions if not action.option_strings]
            self.usage = " ".join([self.prog, *words, "[options]"])
        if common and not is_whole:
            flags = {f"--{name}" for name in common} | {"--help"}
            hidden = [
                action
                for action in self._actions
                if action.option_strings and not flags.intersection(action.option_strings)
            ]
            for action in self._actions:
                action.help = _VARIABLE.sub("", action.help or "")
            for action in hidden:
                action.help = argparse.SUPPRESS
            more = f"{self.prog} --help=all shows {len(hidden)} more options, and their variables."
            self.epilog = f"{self.epilog}\n{more}" if self.epilog else more
        if not common:  # it takes `all` too, but there is no more
            self._option_string_actions["--help"].nargs = 0
        self.print_help()

    def parse_args(  # type: ignore[override]  # one of its forms is enough
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        parsed = super().parse_args(args, namespace)
        if self._faults:
            self._refuse(self._faults, "")
        return parsed

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """argparse would end with the first value that cannot be."""
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._faults.append(str(error))
            return argparse.SUPPRESS  # sets nothing

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            unknown = re.findall(r"(?<!\S)--[\w-]+", message)
            if unknown:  # the rest are their values, or a MODEL that such a value replaced
                message = f"unrecognized arguments: {' '.join(unknown)}"
            # Without dashes in front, which all have in common.
            known = [name[2:] for name in self._option_string_actions if name.startswith("--")]
            near = [get_close_matches(flag[2:], known, 1) for flag in unknown]
            meant = dict.fromkeys(f"--{found[0]}" for found in near if found)
            hint = f"did you mean {' and '.join(meant)}?" if meant else ""
        self._refuse([*self._faults, message], hint)

    def _refuse(self, faults: list[str], hint: str) -> NoReturn:
        hint = hint or f"{self.prog} --help lists all there is"
        self.exit(2, f"{self.prog}: {join_faults(faults)}; {hint}\n")


class _Help(argparse.Action):
    """`--help`, and `--help=all`."""

    def __init__(self, *, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, CommandParser)
        parser.show_help(is_whole=values == "all")
        parser.exit()


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
