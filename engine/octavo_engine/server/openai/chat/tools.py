"""The tools that a chat offers and how they may be called: read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from octavo_engine.dialects.tools import Tool, Tools
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.errors import not_supported

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """What a request says of tools, in one form."""

    tools: Tools  # those that may be called
    mode: Mode
    named: Tool | None = None  # the one that must be
    parallel: bool = True  # whether an answer may have more than one call


def read_offer(
    tools: list[dict[str, Any]] | None, tool_choice: Any, parallel_tool_calls: bool | None
) -> ToolOffer:
    """Raises RequestError (400) that names the field."""
    known = read_tools(tools)
    parallel = parallel_tool_calls is not False
    if tool_choice is None:
        tool_choice = "auto" if known.tools else "none"
    if isinstance(tool_choice, dict):
        return _chosen(known, tool_choice, parallel)
    if tool_choice not in ("none", "auto", "required"):
        raise InvalidRequest(
            f"tool_choice must be none, auto, required or name a function; got {tool_choice!r:.50}",
            param="tool_choice",
        )
    if tool_choice == "required" and not known.tools:
        raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
    mode: Mode = tool_choice if known.tools else "none"
    return ToolOffer(tools=known, mode=mode, parallel=parallel)


def read_tools(tools: list[dict[str, Any]] | None) -> Tools:
    """Raises RequestError (400) that names the field."""
    if tools is None:
        return Tools()
    if not tools:
        raise InvalidRequest("tools must not be empty; leave it out", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be at most {MAX_TOOLS}; got {len(tools)}", param="tools")
    known: dict[str, Tool] = {}
    for number, given in enumerate(tools):
        tool = _tool(f"tools[{number}]", given)
        if tool.name in known:
            at = f"tools[{number}].function.name"
            raise InvalidRequest(f"{at}: {tool.name} is given twice", param=at)
        known[tool.name] = tool
    return Tools(tuple(known.values()))


def _tool(at: str, given: dict[str, Any]) -> Tool:
    if given.get("type", "function") != "function":
        raise not_supported(f"{at}.type", "only function is")
    function = given.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{at}.function must be an object", param=f"{at}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        field = f"{at}.function.name"
        raise InvalidRequest(f"{field} must be 1 to 128 of A-Z a-z 0-9 _ . -", param=field)
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        field = f"{at}.function.parameters"
        raise InvalidRequest(f"{field} must be a JSON schema", param=field)
    return Tool(name=name, parameters=parameters or {}, strict=function.get("strict") is True)


def _chosen(known: Tools, choice: dict[str, Any], parallel: bool) -> ToolOffer:
    """A function by name, or some of the tools."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolOffer(tools=known, mode="named", named=_known(known, name), parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*some], **rest}}:
            mode = rest.get("mode", "auto")
            if mode not in ("auto", "required") or not some:
                raise InvalidRequest(
                    "tool_choice.allowed_tools needs tools and a mode of auto or required",
                    param="tool_choice",
                )
            names = [_name_of(item) for item in some]
            allowed = Tools(tuple(_known(known, name) for name in dict.fromkeys(names)))
            return ToolOffer(tools=allowed, mode=mode, parallel=parallel)
        case _:
            raise InvalidRequest(
                'tool_choice must look like {"type": "function", "function": {"name": …}}',
                param="tool_choice",
            )


def _known(tools: Tools, name: str) -> Tool:
    tool = tools.get(name)
    if tool is None:
        raise InvalidRequest(
            f"tool_choice names {name[:128]}, which is not among the tools", param="tool_choice"
        )
    return tool


def _name_of(item: Any) -> str:
    match item:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case _:
            raise InvalidRequest("tool_choice: each tool needs a name", param="tool_choice")
