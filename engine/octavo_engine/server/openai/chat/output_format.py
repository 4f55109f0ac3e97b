"""How one chat's answers will be read, and what they must look like: decided before they begin."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.dialects.answer import AnswerParser, OnlyCalls
from octavo_engine.dialects.grammar_of_tools import (
    Enforced,
    at_least_one,
    calls_or,
    one_named,
    strict_calls,
)
from octavo_engine.dialects.tools import Tool, Tools
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.generation.structured import (
    as_shape,
    checked,
    grammar_of,
    in_grammar_thread,
    wants_grammar,
)
from octavo_engine.server.http.errors import not_supported

if TYPE_CHECKING:
    from octavo_engine.dialects.events import Parser
    from octavo_engine.dialects.reasoning import ReasoningFormat
    from octavo_engine.server.openai.chat.dialect import Dialect
    from octavo_engine.server.openai.chat.tools import ToolOffer
    from octavo_engine.server.openai.schemas import ChatCompletionRequest
    from octavo_engine.state.grammar import GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """One request's. Its parsers are made one an answer."""

    offer: ToolOffer
    dialect: Dialect
    reasoning: ReasoningFormat | None = None  # None: it is not looked for
    is_open: bool = False  # the prompt ends inside reasoning
    shows_reasoning: bool = True
    enforced: Enforced | None = None
    grammar: GrammarSpec | None = None

    @property
    def reads_calls(self) -> bool:
        return self.offer.mode != "none" and (
            self.dialect.tools is not None or self.enforced is not None
        )

    @property
    def is_plain(self) -> bool:
        """The text is the content as it comes."""
        return self.reasoning is None and not self.reads_calls

    @property
    def ends_with_calls(self) -> bool:
        """Whether calls are the reason to stop; a named function's are not, by custom."""
        return self.offer.mode in ("auto", "required")

    @property
    def short_ids(self) -> bool:
        return self.dialect.tools is not None and self.dialect.tools.short_ids

    @property
    def shown_ids(self) -> tuple[int, ...]:
        """Control tokens that the text must have for the parsers to see."""
        ids = self.dialect.tool_ids if self.reads_calls else ()
        return ids if self.reasoning is None else (*ids, *self.dialect.reasoning_ids)

    def parser(self) -> AnswerParser:
        if self.reasoning is None:
            return AnswerParser(None, self._calls())
        both = self.reasoning.reads_calls and self.reads_calls and self.enforced is None
        reasoning = self.reasoning.parser(
            is_open=self.is_open, tools=self.offer.tools if both else None
        )
        if both:
            return AnswerParser(reasoning, None)
        tools = self.dialect.tools
        in_own_words = self.enforced is None or self.enforced.reads == "dialect"
        begins = tools.begins if tools is not None and in_own_words else ()
        return AnswerParser(reasoning, self._calls(), begins=begins, callable=self.offer.tools)

    def _calls(self) -> Parser | None:
        if not self.reads_calls:
            return None
        if self.enforced is not None:
            calls = self.enforced.parser(self.dialect.tools, self.offer.tools)
            return OnlyCalls(calls) if self.offer.mode == "required" else calls
        assert self.dialect.tools is not None
        return self.dialect.tools.syntax.parser(self.offer.tools)


async def plan(
    request: ChatCompletionRequest, offer: ToolOffer, dialect: Dialect, prompt: str
) -> OutputFormat:
    """`prompt` as it was rendered. Raises RequestError for what cannot be enforced."""
    if offer.mode == "auto" and dialect.tools is None:
        raise not_supported(
            "tools",
            "parsing tool calls is disabled on this server (--tool-call-parser none); use "
            'tool_choice "required" or a function\'s name',
        )
    budget = _budget(request, dialect)
    reasoning = dialect.reasoning
    is_open = reasoning is not None and _is_open(reasoning, request, prompt)
    after = reasoning.closes[0] if reasoning is not None and is_open else None
    reading = OutputFormat(
        offer=offer,
        dialect=dialect,
        reasoning=reasoning,
        is_open=is_open,
        shows_reasoning=request.include_reasoning is not False,
    )
    if offer.mode in ("none", "auto") and not wants_grammar(request) and not _has_strict(offer):
        return _limited(reading, budget, after)
    reading = await in_grammar_thread(partial(_enforce, reading, request, after))
    return _limited(reading, budget, after)


def _budget(request: ChatCompletionRequest, dialect: Dialect) -> int | None:
    """Tokens that the model may think for; None: as many as it likes."""
    field, budget = "thinking_token_budget", request.thinking_token_budget
    if budget is None or budget == -1:
        return None
    if not 0 <= budget < 2**31:
        raise InvalidRequest(f"{field} must be -1 or at least 0; got {budget}", param=field)
    if dialect.reasoning is None:
        raise not_supported(
            field,
            "the chat template does not show how this model marks its reasoning; start the server "
            "with --reasoning-parser",
        )
    return budget


def _limited(reading: OutputFormat, budget: int | None, after: str | None) -> OutputFormat:
    """With the end of reasoning forced where their tokens are used up."""
    if budget is None or reading.reasoning is None:
        return reading
    from octavo_engine.grammar import normal

    grammar = reading.grammar
    if after is not None:
        grammar = grammar or normal.anything_spec()
        grammar = msgspec.structs.replace(grammar, after=after, budget=budget)
    elif grammar is None:  # an enforced answer begins at once, without reasoning
        grammar = msgspec.structs.replace(
            normal.anything_spec(), after=reading.reasoning.closes[0], budget=budget,
            opens=reading.reasoning.opens,
        )  # fmt: skip
    return dataclasses.replace(reading, grammar=grammar)


def _is_open(reasoning: ReasoningFormat, request: ChatCompletionRequest, prompt: str) -> bool:
    if not request.continue_final_message:
        return reasoning.is_open_after(prompt)
    begun = request.messages[-1].content
    return isinstance(begun, str) and reasoning.is_open_inside(begun)


def _enforce(
    reading: OutputFormat, request: ChatCompletionRequest, after: str | None
) -> OutputFormat:
    answer = grammar_of(request, after=after)
    tools, left_over = _enforceable(reading.offer)
    enforced = _enforced(dataclasses.replace(reading, offer=tools), answer)
    if enforced is None:
        return dataclasses.replace(reading, grammar=answer)
    try:
        grammar = checked(_spec(enforced, after))
    except InvalidRequest as error:
        error.param = "tools"
        raise
    if answer is not None and reading.offer.mode == "auto":
        left_over |= set(answer.left_over)
    grammar = msgspec.structs.replace(grammar, left_over=tuple(sorted(left_over)))
    return dataclasses.replace(reading, enforced=enforced, grammar=grammar)


def _enforceable(offer: ToolOffer) -> tuple[ToolOffer, set[str]]:
    """The same tools with arguments as a grammar can enforce them, and keywords that it cannot."""
    from octavo_engine.grammar.enforceable import enforceable

    left_over: set[str] = set()
    tools: list[Tool] = []
    for tool in offer.tools.tools if offer.mode != "none" else ():
        try:
            found = enforceable(tool.parameters, relax=not tool.strict)
        except InvalidRequest as error:
            error.param = "tools"
            raise
        # Without strict, a call that is not forced follows no schema.
        if tool.strict or offer.mode in ("required", "named"):
            left_over.update(found.left_over)
        tools.append(dataclasses.replace(tool, parameters=found.schema))
    changed = Tools(tuple(tools))
    named = None if offer.named is None else changed.get(offer.named.name)
    return dataclasses.replace(offer, tools=changed, named=named), left_over


def _enforced(reading: OutputFormat, answer: GrammarSpec | None) -> Enforced | None:
    offer, format = reading.offer, reading.dialect.tools
    tools = offer.tools.tools
    if offer.mode == "named" and offer.named is not None:
        return one_named(offer.named)
    if offer.mode == "required":
        return at_least_one(tools, format, parallel=offer.parallel)
    if offer.mode == "none":
        return None
    if answer is None:
        return strict_calls(tools, format, parallel=offer.parallel)
    either = calls_or(tools, format, as_shape(answer), parallel=offer.parallel)
    if either is None:
        raise not_supported(
            "response_format",
            'with this model it excludes tools that may be called; set tool_choice to "none" or '
            '"required"',
        )
    return either


def _spec(enforced: Enforced, after: str | None) -> GrammarSpec:
    from octavo_engine.grammar import normal

    value: dict[str, Any] = enforced.value
    if enforced.kind == "json_schema":
        return normal.json_schema_spec(value, after=after)
    return normal.structural_tag_spec(value, after=after)


def _has_strict(offer: ToolOffer) -> bool:
    return offer.mode == "auto" and any(tool.strict for tool in offer.tools.tools)
