"""vLLM's settings given to `LLM(...)`: refused with advice, or accepted if they change nothing."""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from octavo_engine.errors import ConfigError
from octavo_engine.protocol.vllm_options import (
    UNSUPPORTED_OPTIONS,
    UNSUPPORTED_PYTHON,
    own_value,
    refusal,
    statement,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo_engine.config import Quantization, WeightFormat


def check_llm_options(others: Mapping[str, object], init: Callable[..., None]) -> None:
    """What `init` has no argument for. Raises ConfigError for vLLM's settings, else TypeError."""
    for name, value in others.items():
        option = name.replace("_", "-")
        if name not in UNSUPPORTED_PYTHON and option not in UNSUPPORTED_OPTIONS:
            raise TypeError(f"LLM() has no argument {name}; {_hint(name, init)}")
        advice = (
            refusal(name, value, UNSUPPORTED_PYTHON)
            if name in UNSUPPORTED_PYTHON
            else refusal(option, value, UNSUPPORTED_OPTIONS)
        )
        if advice is not None:
            raise ConfigError(f"LLM({name}={value!r:.60}) is not supported: {_in_python(advice)}")


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


def _in_python(advice: str) -> str:
    """Flags as arguments: `--memory-fraction` is `memory_fraction`."""
    return re.sub(r"--([a-z-]+[a-z])", lambda flag: flag[1].replace("-", "_"), advice)


def _hint(name: str, init: Callable[..., None]) -> str:
    known = [each for each in inspect.signature(init).parameters if each not in ("self", "others")]
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
