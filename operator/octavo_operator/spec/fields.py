"""Reads the fields of untrusted YAML one by one: type, bounds, default, and nothing left over.

Where the reader was given a list of `unknown` fields, their paths go there instead of being errors.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from octavo_operator.errors import SpecInvalid
from octavo_operator.objects.quantities import parse_duration, parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Choice = TypeVar("Choice", bound=str)

_PERCENT = re.compile(r"(?:100|[1-9]?[0-9])%")


class FieldReader:
    """One object of the spec. Every read names its field; `end` refuses fields that were not read.

    A null is an absent field, as it is to the API server.
    """

    def __init__(self, value: object, path: str, unknown: list[str] | None = None) -> None:
        if not isinstance(value, Mapping):
            raise SpecInvalid(path, f"must be an object; got {show(value)}")
        for key in value:
            if not isinstance(key, str):
                raise SpecInvalid(path, f"must have strings as keys; got {show(key)}")
        self.path = path
        self._values = {key: item for key, item in value.items() if item is not None}
        self._known: list[str] = []
        self._unknown = unknown

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def at(self, name: str) -> str:
        return f"{self.path}.{name}"

    def fail(self, name: str, problem: str) -> SpecInvalid:
        return SpecInvalid(self.at(name), problem)

    def end(self) -> None:
        """No field may be silently without effect: it is an error, or goes into the list."""
        for name in self._values:
            if name in self._known:
                continue
            if self._unknown is not None:
                self._unknown.append(self.at(name[:80]))
                continue
            near = difflib.get_close_matches(name, self._known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(self._known)}"
            raise SpecInvalid(
                self.at(name[:80]),
                f"is not a field of this version of Octavo; {hint}",
                reason="UnsupportedVersion",
            )

    def raw(self, name: str) -> Any:
        """The value, or None where it is absent."""
        self._known.append(name)
        return self._values.get(name)

    def optional(self, name: str) -> FieldReader | None:
        value = self.raw(name)
        return None if value is None else self.inside(value, self.at(name))

    def section(self, name: str) -> FieldReader:
        """An object whose fields all have defaults: absent and empty are the same."""
        value = self.raw(name)
        return self.inside({} if value is None else value, self.at(name))

    def inside(self, value: object, path: str) -> FieldReader:
        """An object below this one."""
        return FieldReader(value, path, self._unknown)

    def objects(self, name: str, read: Callable[[FieldReader], T], *, most: int) -> tuple[T, ...]:
        return self.items(name, lambda item, path: read(self.inside(item, path)), most=most)

    def text(
        self, name: str, default: str = "", *, longest: int, pattern: str = "", form: str = ""
    ) -> str:
        """`form` describes `pattern` in words."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(name, f"must be a string; got {show(value)}")
        if len(value) > longest:
            raise self.fail(name, f"must have at most {longest} characters; got {len(value)}")
        if any(not character.isprintable() for character in value):
            raise self.fail(name, f"must not have control characters; got {show(value)}")
        if pattern and not re.fullmatch(pattern, value):
            raise self.fail(name, f"must be {form}; got {show(value)}")
        return value

    def required_text(self, name: str, *, longest: int, pattern: str = "", form: str = "") -> str:
        value = self.text(name, longest=longest, pattern=pattern, form=form)
        if not value:
            raise self.fail(name, "is required and must not be empty")
        return value

    def choice(self, name: str, choices: Sequence[Choice], default: Choice) -> Choice:
        value = self.raw(name)
        if value is None:
            return default
        for choice in choices:
            if value == choice:
                return choice
        raise SpecInvalid(
            self.at(name),
            f"must be one of {', '.join(choices)}; got {show(value)}",
            reason="UnsupportedVersion" if isinstance(value, str) else "SpecInvalid",
        )

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, f"must be true or false; got {show(value)}")
        return value

    def maybe_integer(self, name: str, *, least: int, most: int) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        # A whole float is the same JSON number to the API server.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"must be a whole number; got {show(value)}")
        if not least <= value <= most:
            raise self.fail(name, f"must be from {least} to {most}; got {show(value)}")
        return value

    def integer(self, name: str, default: int, *, least: int, most: int) -> int:
        value = self.maybe_integer(name, least=least, most=most)
        return default if value is None else value

    def maybe_number(self, name: str, *, least: float, most: float) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, f"must be a number; got {show(value)}")
        if not (least <= value <= most and math.isfinite(value)):
            raise self.fail(name, f"must be from {least:g} to {most:g}; got {show(value)}")
        return float(value)

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        value = self.maybe_number(name, least=least, most=most)
        return default if value is None else value

    def maybe_duration(self, name: str, *, least_s: float, most_s: float) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        try:
            seconds = parse_duration(value if isinstance(value, str) and len(value) < 33 else "")
        except ValueError as error:
            raise self.fail(name, f"{error}; got {show(value)}") from None
        if not least_s <= seconds <= most_s:
            raise self.fail(name, f"must be from {least_s:g}s to {most_s:g}s; got {show(value)}")
        return seconds

    def duration(self, name: str, default_s: float, *, least_s: float, most_s: float) -> float:
        value = self.maybe_duration(name, least_s=least_s, most_s=most_s)
        return float(default_s) if value is None else value

    def maybe_quantity(self, name: str) -> str | None:
        """As it was written: Kubernetes keeps the text too."""
        return None if (value := self.raw(name)) is None else self.check_quantity(name, value)

    def check_quantity(self, name: str, value: object) -> str:
        is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
        text = str(value) if is_scalar else ""
        try:
            parse_quantity(text if len(text) < 33 else "")
        except ValueError as error:
            raise self.fail(name, f"{error}; got {show(value)}") from None
        return text

    def count(self, name: str, default: str | int) -> str | int:
        """A number of pods, or a share of them such as 25%."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, str) and _PERCENT.fullmatch(value):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1000:
            return value
        raise self.fail(name, f"must be from 0 to 1000 or a share such as 25%; got {show(value)}")

    def items(self, name: str, read: Callable[[object, str], T], *, most: int) -> tuple[T, ...]:
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.fail(name, f"must be a list; got {show(value)}")
        if len(value) > most:
            raise self.fail(name, f"must have at most {most} items; got {len(value)}")
        return tuple(read(item, f"{self.at(name)}[{i}]") for i, item in enumerate(value))

    def mapping(self, name: str, read: Callable[[object, str], T], *, most: int) -> dict[str, T]:
        fields = self.section(name)
        if len(fields._values) > most:
            raise self.fail(name, f"must have at most {most} entries; got {len(fields._values)}")
        return {
            key: read(item, f"{fields.path}.{key[:80]}") for key, item in fields._values.items()
        }


def show(value: object) -> str:
    """As YAML would have it, and short: it ends up in a condition."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, str | int | float):
        text = repr(value) if isinstance(value, str) else str(value)[:80]
        return text if len(text) <= 80 else f"{text[:79]}…"
    return "a list" if isinstance(value, list | tuple) else "an object"
