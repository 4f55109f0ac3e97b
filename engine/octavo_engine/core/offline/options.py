"""vLLM's settings given to `LLM(...)`: refused with advice, or accepted if they change nothing."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, ParamSpec, cast

from octavo_common.faults import join_faults
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.protocol.vllm_options import (
    UNSUPPORTED_OPTIONS,
    UNSUPPORTED_PYTHON,
    own_value,
    refusal,
    statement,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo_engine.config import Quantization, WeightFormat

Given = ParamSpec("Given")

# By the annotation of an argument: what it may be, and that in words. All others are words.
_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "bool": ((bool,), "True or False"),
    "int": ((Integral,), "a whole number"),
    "float": ((Real,), "a number"),
    "str": ((str,), "a string"),
    "PathLike[str]": ((PathLike,), "a path"),
    "Mapping[str, Any]": ((Mapping,), "a dict"),
}
_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(EngineConfig))


def check_llm_options(others: Mapping[str, object], init: Callable[..., None]) -> None:
    """What `init` has no argument for, all at once. Raises TypeError for names that neither vLLM
    has, ConfigError where some are vLLM's settings."""
    unknown: list[str] = []
    refused: list[str] = []
    for name, value in others.items():
        option = name.replace("_", "-")
        if name not in UNSUPPORTED_PYTHON and option not in UNSUPPORTED_OPTIONS:
            unknown.append(f"LLM() has no argument {name}; {_hint(name, init)}")
            continue
        advice = (
            refusal(name, value, UNSUPPORTED_PYTHON)
            if name in UNSUPPORTED_PYTHON
            else refusal(option, value, UNSUPPORTED_OPTIONS)
        )
        if advice is not None:
            refused.append(f"LLM({name}={value!r:.60}) is not supported: {advice}")
    if refused:
        raise ConfigError(join_faults([*refused, *unknown]))
    if unknown:
        raise TypeError(join_faults(unknown))


def as_in_vllm(init: Callable[Given, None]) -> Callable[Given, None]:
    """None is an argument's default, as in vLLM, whose own defaults are None; wrong types are
    refused, and what goes wrong is reported with the names of arguments."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(*given: Given.args, **by_name: Given.kwargs) -> None:
        for name in [name for name in by_name if name in known and by_name[name] is None]:
            del by_name[name]
        _check_types(dict(zip(known, given, strict=False)) | by_name, init)
        with _errors_in_python(init):
            init(*given, **by_name)

    return checked


def _check_types(given: Mapping[str, object], init: Callable[..., None]) -> None:
    """Raises ConfigError for an argument of another type than its annotation."""
    for name, parameter in inspect.signature(init).parameters.items():
        kinds = [_KINDS[kind] for kind in str(parameter.annotation).split(" | ") if kind in _KINDS]
        value = given.get(name, parameter.default)
        if not kinds or (value is None and "None" in str(parameter.annotation)):
            continue
        fits = any(
            isinstance(value, types) and (types == (bool,) or not isinstance(value, bool))
            for types, _ in kinds
        )
        if not fits:
            raise ConfigError(
                f"{name} must be {' or '.join(words for _, words in kinds)}; got {value!r:.60}"
            )


@contextmanager
def _errors_in_python(init: Callable[..., None]) -> Iterator[None]:
    """What went wrong, with the names of arguments instead of flags."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        error.args = (_in_python(str(error), init), *error.args[1:])
        raise


def llm_value(option: str, value: Any) -> Any:
    """Raises ConfigError for a value of vLLM's that cannot be had."""
    try:
        return own_value(option, value)
    except ValueError as error:
        name = option.replace("-", "_")
        raise ConfigError(f"LLM({name}={value!r:.60}) is not supported: {error}") from None


def llm_quantization(given: Quantization | WeightFormat) -> tuple[WeightFormat, Quantization]:
    """How the files must be quantized, and what is done to them; one of the two is auto."""
    stated = statement("quantization", given)
    if stated is not None:
        return cast("WeightFormat", stated[1]), "auto"
    return "auto", cast("Quantization", llm_value("quantization", given))


def _in_python(advice: str, init: Callable[..., None]) -> str:
    """Flags as arguments: `--memory-fraction` is `memory_fraction`."""
    known = inspect.signature(init).parameters

    def argument(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        if name in known:
            return name
        return f"{name} of EngineConfig" if name in _FIELDS else f"`octavo serve {flag[0]}`"

    return re.sub(r"(?<![\w-])--([a-z-]+[a-z])", argument, advice)


def _hint(name: str, init: Callable[..., None]) -> str:
    if name in _FIELDS:
        return f"LLM.from_config(EngineConfig(model=…, {name}=…)) sets it"
    known = [each for each in inspect.signature(init).parameters if each not in ("self", "others")]
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
