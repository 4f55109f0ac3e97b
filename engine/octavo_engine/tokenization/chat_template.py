"""A model's chat template: conversations to prompt text, in a sandbox and within limits."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest, ModelError
from octavo_engine.tokenization.messages import MARKS, checked_messages, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2 import Template as JinjaTemplate

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
MAX_RENDER_S = 2.0
_TOOL_USE = "tool_use"
_PROBES = ("octavo-probe-one", "octavo-probe-two")
_CONTINUE = (
    "OCTAVO_CONTINUES_HERE "  # marks where the final message ends; cut off with all after it
)


def _local_now() -> datetime:
    return datetime.now()  # local time without a zone is what templates were written for


class ChatTemplate:
    """One template, or several by name of which `tool_use` serves conversations with tools."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        where: str = "the chat template",
        now: Callable[[], datetime] = _local_now,
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in self.sources:
            if len(self.sources) != 1:
                names = ", ".join(sorted(self.sources)) or "none"
                raise ModelError(f"{where} has no template named default; it has {names}")
            self.sources["default"] = next(iter(self.sources.values()))
        self._special_tokens = dict(special_tokens or {})
        self._templates = {
            name: _compile(text, f"{where} ({name})", now) for name, text in self.sources.items()
        }
        # Rendering two parts shows more than reading the template would.
        self._takes_parts = self._renders_parts()
        # Most want the arguments of a call as an object, some as text.
        self._wants_text = (
            self.mentions("arguments")
            and not self._renders_call({"probe": _PROBES[0]})
            and self._renders_call(f'{{"probe": "{_PROBES[0]}"}}')
        )

    def with_source(self, source: str) -> ChatTemplate:
        """Another template for the same model: its special tokens stay. Raises ModelError."""
        return ChatTemplate(source, special_tokens=self._special_tokens)

    def mentions(self, word: str) -> bool:
        """Whether it looks at a variable of this name, as far as its text shows."""
        return any(word in source for source in self.sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. Raises InvalidRequest(param="messages")."""
        return self.render_guarded(
            messages,
            guard=str,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            documents=documents,
            **kwargs,
        )

    def render_guarded(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        guard: Callable[[str], str],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        continue_final_message: bool,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """As `render`, with every string that comes from outside passed through `guard` first."""
        if continue_final_message and add_generation_prompt:
            raise _refuse("continue_final_message and add_generation_prompt exclude each other")
        checked = checked_messages(messages, keep_parts=self._takes_parts)
        if self._wants_text:
            _write_arguments(checked)
        guarded = [_guarded(message, guard) for message in checked]
        final = _mark_final(guarded) if continue_final_message else None
        variables = {
            **self._special_tokens,
            **plain(kwargs, "chat_template_kwargs", convert=guard),
            "messages": guarded,
            "tools": plain(list(tools), "tools", convert=guard) if tools else None,
            "documents": plain(list(documents), "documents", convert=guard) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        name = _TOOL_USE if tools and _TOOL_USE in self._templates else "default"
        text = _render(self._templates[name], variables)
        return text if final is None else _cut(text, final)

    def _renders_parts(self) -> bool:
        parts = [{"type": "text", "text": probe} for probe in _PROBES]
        variables = {
            **self._special_tokens,
            "messages": [{"role": "user", "content": parts}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
        }
        try:
            text = _render(self._templates["default"], variables)
        except InvalidRequest:
            return False
        return all(probe in text for probe in _PROBES) and "'text'" not in text

    def _renders_call(self, arguments: Any) -> bool:
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "octavo000", "type": "function", "function": function}
        variables = {
            **self._special_tokens,
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ],
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
        }
        try:
            return _PROBES[0] in _render(self._templates["default"], variables)
        except InvalidRequest:
            return False


def _write_arguments(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


def _compile(source: str, where: str, now: Callable[[], datetime]) -> JinjaTemplate:
    from jinja2 import TemplateError

    from octavo_engine.tokenization.template_environment import TemplateEnvironment

    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelError(f"{where} has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}")
    try:
        return TemplateEnvironment(now).from_string(source)
    except (TemplateError, RecursionError, SyntaxError, ValueError, ArithmeticError) as error:
        line = getattr(error, "lineno", None)
        raise ModelError(
            f"{where} is broken{f' in line {line}' if line else ''}: {error}"
        ) from None


def _render(template: JinjaTemplate, variables: Mapping[str, Any]) -> str:
    from octavo_engine.tokenization.template_bounds import limited_time
    from octavo_engine.tokenization.template_environment import CountedRange

    pieces: list[str] = []
    size = 0
    deadline = time.monotonic() + MAX_RENDER_S
    try:
        with limited_time(MAX_RENDER_S):
            for piece in template.generate({**variables, "range": CountedRange()}):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise _refuse(
                        f"the chat template makes more than {MAX_OUTPUT_CHARS} characters"
                    )
                if time.monotonic() > deadline:
                    raise _refuse(f"the chat template takes longer than {MAX_RENDER_S:g} s")
    except InvalidRequest:
        raise
    except Exception as error:
        # A template is a program of its own: whatever it raises is about these messages.
        raise _refuse(f"the chat template cannot render these messages: {error}") from error
    return "".join(pieces)


def _guarded(message: dict[str, Any], guard: Callable[[str], str]) -> dict[str, Any]:
    """All but roles: these are checked names, and templates build control tokens from them."""
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    guarded = {k: plain(v, "messages", convert=guard) for k, v in message.items() if k != "role"}
    guarded = {"role": message["role"], **guarded}
    if isinstance(guarded.get("content"), list):
        for part, given in zip(guarded["content"], message["content"], strict=True):
            part["type"] = "text" if "text" in part else given["type"]
    return guarded


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Appends the mark to the final message's text, which is returned without it."""
    message = messages[-1]
    content = message.get("content")
    if isinstance(content, list) and content and content[-1] not in MARKS:
        text = str(content[-1]["text"])
        content[-1]["text"] = text + _CONTINUE
        return text
    if not isinstance(content, str):
        raise _refuse("continue_final_message needs a final message with content")
    message["content"] = content + _CONTINUE
    return content


def _cut(text: str, final: str) -> str:
    mark = _CONTINUE.strip()
    if mark not in text or final.strip() not in text:
        raise _refuse("continue_final_message: the chat template drops the final message")
    at = text.rindex(mark)
    # A template that trims took the mark's own space, and so would have trimmed the text's end.
    kept = text[at : at + len(_CONTINUE)] == _CONTINUE
    return text[:at] if kept else text[:at].rstrip()


def _refuse(problem: str) -> InvalidRequest:
    return InvalidRequest(problem, param="messages")
