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
# Where an image's files come from; its other files are its base's.
_PREFIX: Final = "/opt/octavo"


@dataclass(slots=True)
class Recipe:
    """`config` as an image's own; `steps`: the words of each call of images/files.py."""

    base: str  # BASE or BUILD_BASE
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[list[str]] = field(default_factory=list)


def recipe(dockerfile: str, name: str, arguments: Mapping[str, str]) -> Recipe:
    """Raises ValueError for an instruction that this reader does not know, or cannot follow."""
    stages = _stages(dockerfile)
    found = Recipe(base="", config={"Env": [], "Labels": {}, "ExposedPorts": {}})
    copied: list[str] = []
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
            elif instruction == "COPY":
                copied.append(rest)
            else:
                _apply(found.config, instruction, _substituted(rest, values))
    if copied != [f"--from={name}-files {_PREFIX} {_PREFIX}"]:
        raise ValueError(f"images/recipe.py copies {_PREFIX} of {name}-files alone, not {copied}")
    for instruction, rest in stages[f"{name}-files"][1]:
        if instruction == "RUN":
            found.steps += _calls(rest, arguments)
    return found


def _calls(run: str, arguments: Mapping[str, str]) -> list[list[str]]:
    """The words of the one call of images/files.py in a RUN; none if its argument is not given."""
    condition = _CONDITION.match(run)
    command = run.removeprefix(condition[0]).removesuffix("; fi") if condition else run
    call = _FILES.fullmatch(command)
    if call is None:
        raise ValueError(f"images/recipe.py cannot run: {run}")
    if condition is not None and not arguments.get(condition["name"]):
        return []
    return [shlex.split(call["words"])]


def _apply(config: dict[str, Any], instruction: str, rest: str) -> None:
    match instruction:
        case "ENV":
            variables = dict(word.split("=", 1) for word in [*config["Env"], *shlex.split(rest)])
            config["Env"] = [f"{key}={value}" for key, value in variables.items()]
        case "LABEL":
            config["Labels"] |= dict(word.split("=", 1) for word in shlex.split(rest))
        case "EXPOSE":
            config["ExposedPorts"][f"{rest}/tcp"] = {}
        case "WORKDIR":
            config["WorkingDir"] = rest
        case "USER":
            config["User"] = rest
        case "ENTRYPOINT":
            config["Entrypoint"] = json.loads(rest)
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
