"""The dialect that the served model speaks: named by flags, or detected from its chat template."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from octavo_engine.dialects.detect import Detected, detect
from octavo_engine.dialects.formats import (
    GENERIC,
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    ToolFormat,
)
from octavo_engine.errors import ConfigError, RequestError
from octavo_engine.tokenization.chat_template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from octavo_engine.dialects.reasoning import ReasoningFormat
    from octavo_engine.server.settings import ServerSettings
    from octavo_engine.tokenization.tokenizer import Template, Tokenizer

_PROBE = "octavo_probe"

T = TypeVar("T")


class Formats(NamedTuple):
    """By every name that a flag may give."""

    tools: Mapping[str, ToolFormat]
    reasoning: Mapping[str, ReasoningFormat]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How this model writes calls and reasoning; None: in no known format."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    tool_ids: tuple[int, ...] = ()  # control tokens that the parser of calls must see
    reasoning_ids: tuple[int, ...] = ()

    @property
    def describes_tools(self) -> bool:
        """Whether the prompt must say how tools are called: the template does not."""
        return self.tools is not None and self.tools.is_described


def choose(settings: ServerSettings, tokenizer: Tokenizer, formats: Formats) -> Dialect:
    """Settled once the model is loaded; `formats` were known, and checked, when it began to."""
    template = tokenizer.chat_template
    found = Detected(None, None)
    if isinstance(template, ChatTemplate):
        found = detect("\n".join(template.sources.values()))
    name = found.tools
    if template is not None and (name is None or not _shows_tools(template)):
        name = GENERIC
    tools = _pick(settings.tool_call_parser, name, formats.tools)
    reasoning = _pick(settings.reasoning_parser, found.reasoning, formats.reasoning)
    return Dialect(
        tools=tools,
        reasoning=reasoning,
        tool_ids=_ids(tokenizer, tools.special if tools else ()),
        reasoning_ids=_ids(tokenizer, reasoning.special if reasoning else ()),
    )


def _shows_tools(template: Template) -> bool:
    """Whether a prompt has the tools in it. Some templates write calls, but not what may be
    called; of those that break on the question nothing is known."""
    parameters = {"type": "object", "properties": {}}
    tool = {"name": _PROBE, "description": "", "parameters": parameters}
    messages = [{"role": "user", "content": "Hello."}]
    try:
        return _PROBE in template.render(messages, tools=[{"type": "function", "function": tool}])
    except RequestError:
        return True


def known_formats(settings: ServerSettings) -> Formats:
    """A plug-in's included. Raises ConfigError that names the flag."""
    tools = dict(TOOL_FORMATS)
    tools.update({alias: tools[name] for alias, name in TOOL_ALIASES.items()})
    reasoning = dict(REASONING_FORMATS)
    reasoning.update({alias: reasoning[name] for alias, name in REASONING_ALIASES.items()})
    for flag, path in (
        ("--tool-parser-plugin", settings.tool_parser_plugin),
        ("--reasoning-parser-plugin", settings.reasoning_parser_plugin),
    ):
        if not path:
            continue
        plugin = _load(flag, path)
        tools.update(getattr(plugin, "TOOL_FORMATS", {}))
        reasoning.update(getattr(plugin, "REASONING_FORMATS", {}))
    _check("--tool-call-parser", settings.tool_call_parser, tools)
    _check("--reasoning-parser", settings.reasoning_parser, reasoning)
    return Formats(tools, reasoning)


def _load(flag: str, path: str) -> object:
    """The operator's own Python file, with TOOL_FORMATS and REASONING_FORMATS in it."""
    spec = importlib.util.spec_from_file_location("octavo_parser_plugin", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the operator's file does wrong
        raise ConfigError(
            f"{flag}: {path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return module


def _check(flag: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in ("auto", "none") and name not in known:
        raise ConfigError(f"{flag} must be auto, none or one of {', '.join(sorted(known))}")


def _pick(name: str, found: str | None, known: Mapping[str, T]) -> T | None:
    if name == "auto":
        return None if found is None else known[found]
    return None if name == "none" else known[name]


def _ids(tokenizer: Tokenizer, marks: tuple[str, ...]) -> tuple[int, ...]:
    if not marks:
        return ()
    return tuple(sorted(i for i in tokenizer.special_ids if tokenizer.token_text(i) in marks))
