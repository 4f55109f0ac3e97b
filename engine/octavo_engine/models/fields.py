"""Reading an object of config.json: every value is checked, every error names its field."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConfigFields:
    """A JSON object with the defaults of its family.

    An absent field takes its default; a null stays null, because config.json uses it to switch a
    feature off that the family has by default.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
        path: str = "config.json",
    ) -> None:
        """`aliases` are a family's own names for fields; a dot leads into an object."""
        self._values = values
        self._defaults = defaults or {}
        self._aliases = aliases or {}
        self.path = path

    def raw(self, name: str) -> Any:
        """The value as it stands, or its default, or None."""
        found, value = self._find(self._spelled(name))
        return value if found else self._defaults.get(name)

    def _find(self, spelling: str) -> tuple[bool, Any]:
        values: Any = self._values
        *outer, last = spelling.split(".")
        for part in outer:
            values = values.get(part) if isinstance(values, dict) else None
        if (values is self._values or isinstance(values, dict)) and last in values:
            return True, values[last]
        return False, None

    def _spelled(self, name: str) -> str:
        """As the file has it: by the family's own name, but where it uses only the common one."""
        own = self._aliases.get(name, name)
        return name if name in self._values and not self._find(own)[0] else own

    def has(self, name: str) -> bool:
        """Whether the file itself has a field of exactly this name."""
        return name in self._values

    def error(self, name: str, rule: str) -> ModelError:
        value = repr(self.raw(name))
        got = value if len(value) <= 80 else value[:77] + "..."
        return ModelError(f"{self.path}: {self._spelled(name)} {rule}; got {got}")

    def integer(self, name: str, *, maximum: int, minimum: int = 1) -> int:
        value = self.optional_integer(name, minimum=minimum, maximum=maximum)
        if value is None:
            raise self._missing(name)
        return value

    def optional_integer(self, name: str, *, maximum: int, minimum: int = 1) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, "must be an integer")
        if not minimum <= value <= maximum:
            raise self.error(name, f"must be from {minimum} to {maximum}")
        return value

    def positive(self, name: str) -> float:
        value = self.optional_positive(name)
        if value is None:
            raise self._missing(name)
        return value

    def optional_positive(self, name: str) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if not _is_number(value):
            raise self.error(name, "must be a number")
        if value <= 0:
            raise self.error(name, "must be above 0")
        return float(value)

    def positives(self, name: str, count: int) -> tuple[float, ...]:
        """A list of exactly `count` numbers above 0."""
        value = self.raw(name)
        if not isinstance(value, list) or len(value) != count:
            raise self.error(name, f"must be a list of {count} numbers")
        if not all(_is_number(number) and number > 0 for number in value):
            raise self.error(name, "must hold numbers above 0 only")
        return tuple(float(number) for number in value)

    def boolean(self, name: str) -> bool:
        """False if the field is neither given nor has a default."""
        value = self.raw(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str) -> str:
        value = self.optional_text(name)
        if value is None:
            raise self._missing(name)
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "must be a text")
        return value

    def integers(self, name: str, *, maximum: int) -> tuple[int, ...]:
        """A list of integers from 0; a single one may stand alone, null is none."""
        value = self.raw(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= maximum:
                raise self.error(name, f"must be integers from 0 to {maximum}")
        return tuple(values)

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """A list with an entry for each layer, or None."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < num_layers:
            raise self.error(name, f"must be a list with an entry for each of {num_layers} layers")
        return value[:num_layers]

    def section(self, name: str) -> ConfigFields | None:
        """An object within this one; an empty one counts as absent."""
        value = self.raw(name)
        if not value and not isinstance(value, (int, float, str)):
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return ConfigFields(value, path=f"{self.path}: {name}")

    def _missing(self, name: str) -> ModelError:
        return ModelError(
            f"{self.path}: {self._spelled(name)} is missing; the model cannot be built without it"
        )


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -1e300 < value < 1e300
        and math.isfinite(value)
    )
