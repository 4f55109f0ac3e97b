"""What the Dockerfile says of one image, for a builder that runs none of the image's programs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILES: Final = re.compile(r"python3 /images/files\.py (?P<words>[^;]+)")
_CONDITION: Final = re.compile(r'if \[ -n "\$\{(?P<name>\w+)\}" \]; then ')
_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
# Read by builders, and of no use here: where layers come from, and in which folder they are made.
_IGNORED: Final = ("ARG", "COPY", "WORKDIR", "RUN")


@dataclass(slots=True)
class Recipe:
    """`config` as an image's own; `steps`: the words of each call of images/files.py."""

    base: str  # BASE or BUILD_BASE
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[list[str]] = field(default_factory=list)


def recipe(dockerfile: str, name: str, arguments: Mapping[str, str]) -> Recipe:
    """Raises ValueError for an instruction that this reader does not know."""
    stages = _stages(dockerfile)
    found = Recipe(base="", config={"Env": [], "Labels": {}, "ExposedPorts": {}})
    chain = [name]
    while (parent := stages[chain[-1]][0]) in stages:
        chain.append(parent)
    found.base = _VARIABLE.sub(r"\1", parent)
    for stage in reversed(chain):
        values = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        for instruction, rest in stages[stage][1]:
            if instruction == "ARG":
                key, _, default = rest.partition("=")
                values[key] = arguments.get(key, default)
            _apply(found.config, instruction, _substituted(rest, values))
    for instruction, rest in stages[f"{name}-files"][1]:
        if instruction == "RUN" and (call := _FILES.search(rest)):
            condition = _CONDITION.match(rest)
            if condition is None or arguments.get(condition["name"]):
                found.steps.append(shlex.split(call["words"]))
    return found


def _apply(config: dict[str, Any], instruction: str, rest: str) -> None:
    match instruction:
        case "ENV":
            config["Env"] += shlex.split(rest)
        case "LABEL":
            config["Labels"] |= dict(word.split("=", 1) for word in shlex.split(rest))
        case "EXPOSE":
            config["ExposedPorts"][f"{rest}/tcp"] = {}
        case "USER":
            config["User"] = rest
        case "ENTRYPOINT":
            config["Entrypoint"] = json.loads(rest)
        case ignored if ignored in _IGNORED:
            pass
        case unknown:
            raise ValueError(f"images/recipe.py does not know the Dockerfile's {unknown}")


def _substituted(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1], ""), text)


def _stages(dockerfile: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Name → what it is built on, and its instructions."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.M).replace("\\\n", " ")
    stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    instructions: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            instructions = []
            stages[name] = (base, instructions)
        else:
            instructions.append((instruction, rest.strip()))
    return stages
