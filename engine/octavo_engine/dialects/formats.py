"""All formats by name, as data over a few machines, with the control tokens they need to see."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from octavo_engine.dialects import gemma_calls, harmony, marks
from octavo_engine.dialects.headed_calls import HeadedCalls
from octavo_engine.dialects.json_calls import JsonCalls
from octavo_engine.dialects.mistral_calls import MistralCalls
from octavo_engine.dialects.pythonic_calls import PythonicCalls
from octavo_engine.dialects.reasoning import ReasoningFormat
from octavo_engine.dialects.recipient_calls import RecipientCalls
from octavo_engine.dialects.tagged_calls import TaggedCalls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.dialects.events import Parser
    from octavo_engine.dialects.tools import Tools


class CallSyntax(Protocol):
    """How calls are written."""

    def parser(self, tools: Tools) -> Parser: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """A call as text around its arguments, for grammars; NAME stands for the function's."""

    trigger: str  # what begins a call in free text; empty: calls stand at the head of an answer
    begin: str
    end: str
    separator: str = "\n"
    around: tuple[str, str] = ("", "")  # of all calls together


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing calls."""

    syntax: CallSyntax
    special: tuple[str, ...] = ()  # marks that are control tokens: they must be shown to the parser
    tags: CallTags | None = None  # None: where calls are enforced, they are written as plain JSON
    short_ids: bool = False  # the template takes ids of nine letters only
    is_described: bool = False  # in the prompt, since templates do not

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks of which one stands before the first call; none: calls stand alone."""
        return tuple(getattr(self.syntax, "begins", ()))


def _after_separator(heading: str) -> tuple[str, str]:
    return heading.rpartition(marks.DEEPSEEK_SEPARATOR)[2].strip(), ""


def _numbered(heading: str) -> tuple[str, str]:
    """functions.NAME:0"""
    id = heading.strip()
    name, _, number = id.removeprefix("functions.").rpartition(":")
    return (name, id) if name and number.isdigit() else (id.removeprefix("functions."), "")


_QWEN_CODER = TaggedCalls(
    call="<function=", name_ends=(">", "\n", "<"), name_end=">",
    key="<parameter=", key_end=">", value_end="</parameter>", call_end="</function>",
)  # fmt: skip
_GLM = TaggedCalls(
    name_ends=("\n", "<arg_key>", "</tool_call>"),
    key="<arg_key>", key_end="</arg_key>", value="<arg_value>", value_end="</arg_value>",
)  # fmt: skip

_SEED = TaggedCalls(
    wrapper="<seed:tool_call>", wrapper_end="</seed:tool_call>",
    call="<function=", name_ends=(">", "\n", "<"), name_end=">", has_layout=False,
    key="<parameter=", key_end=">", value_end="</parameter>", call_end="</function>",
)  # fmt: skip
_MINIMAX = TaggedCalls(
    wrapper="<minimax:tool_call>", wrapper_end="</minimax:tool_call>",
    call='<invoke name="', name_ends=('">', "\n", "<"), name_end='">',
    key='<parameter name="', key_end='">', value_end="</parameter>", call_end="</invoke>",
)  # fmt: skip
_NS = "]<]minimax[>["
_MINIMAX_M3 = TaggedCalls(
    wrapper=_NS + "<tool_call>", wrapper_end=_NS + "</tool_call>",
    call=_NS + '<invoke name="', name_ends=('">', "\n", "<"), name_end='">', has_layout=False,
    key=_NS + "<", key_end=">", value_end=_NS + "</KEY>", call_end=_NS + "</invoke>", inner=_NS,
)  # fmt: skip


def _dsml(section: str) -> TaggedCalls:
    return TaggedCalls(
        wrapper=f"<{marks.DSML}{section}>", wrapper_end=f"</{marks.DSML}{section}>",
        call=f'<{marks.DSML}invoke name="', name_ends=('">', "\n", "<"), name_end='">',
        key=f'<{marks.DSML}parameter name="', key_end='"', is_typed=True, has_layout=False,
        value_end=f"</{marks.DSML}parameter>", call_end=f"</{marks.DSML}invoke>",
    )  # fmt: skip


_MINICPM = TaggedCalls(
    wrapper="", wrapper_end="", call='<function name="', name_ends=('">', "\n", "<"),
    name_end='">', key='<param name="', key_end='">', value_end="</param>",
    call_end="</function>",
)  # fmt: skip


def _id_and_name(heading: str) -> tuple[str, str]:
    """ID<|tool_call:name|>NAME"""
    id, _, name = heading.rpartition("<|tool_call:name|>")
    return name.strip(), id.strip()


_OBJECT = '{"name": "NAME", "arguments": '


def _listed(before: str, after: str) -> CallTags:
    """Objects in one list between two marks."""
    return CallTags(trigger="", begin=_OBJECT, end="}", separator=", ", around=(before, after))


_GIGACHAT = "<|message_sep|>\n\nfunction call<|role_sep|>"
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_HERMES = ("<tool_call>", "</tool_call>")
_HERMES_TAGS = CallTags(
    trigger="<tool_call>", begin="<tool_call>\n" + _OBJECT, end="}\n</tool_call>"
)

GENERIC = "generic"  # where a template shows none of the others

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({
    GENERIC: ToolFormat(
        syntax=JsonCalls(begins=("<tool_call>",), end="</tool_call>", bare=True),
        special=_HERMES, tags=_HERMES_TAGS, is_described=True,
    ),
    "hermes": ToolFormat(
        syntax=JsonCalls(begins=("<tool_call>",), end="</tool_call>"),
        special=_HERMES, tags=_HERMES_TAGS,
    ),
    "mistral": ToolFormat(
        syntax=MistralCalls(), special=_MISTRAL, short_ids=True,
        tags=_listed("[TOOL_CALLS] [", "]"),
    ),
    "mistral_args": ToolFormat(
        syntax=MistralCalls(), special=_MISTRAL, short_ids=True,
        tags=CallTags(
            trigger="[TOOL_CALLS]", begin="[TOOL_CALLS]NAME[ARGS]", end="", separator=""
        ),
    ),
    "llama3_json": ToolFormat(
        syntax=JsonCalls(begins=("<|python_tag|>",), bare=True, separator=";"),
        special=("<|python_tag|>",),
        tags=CallTags(
            trigger="", begin='{"name": "NAME", "parameters": ', end="}", separator="; "
        ),
    ),
    "pythonic": ToolFormat(syntax=PythonicCalls()),
    "llama4_pythonic": ToolFormat(
        syntax=PythonicCalls(begin="<|python_start|>", end="<|python_end|>"),
        special=("<|python_start|>", "<|python_end|>"),
    ),
    "qwen3_coder": ToolFormat(syntax=_QWEN_CODER, special=_HERMES),
    "glm45": ToolFormat(
        syntax=_GLM,
        special=(*_HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v3": ToolFormat(
        syntax=HeadedCalls(
            section=marks.DEEPSEEK_CALLS, section_end=marks.DEEPSEEK_CALLS_END,
            call=marks.DEEPSEEK_CALL, call_end=marks.DEEPSEEK_CALL_END,
            heading_end="\n```json\n", arguments_end="```", named=_after_separator,
        ),
        special=marks.DEEPSEEK,
        tags=CallTags(
            trigger=marks.DEEPSEEK_CALL,
            begin=f"{marks.DEEPSEEK_CALL}function{marks.DEEPSEEK_SEPARATOR}NAME\n```json\n",
            end=f"\n```{marks.DEEPSEEK_CALL_END}",
            around=(marks.DEEPSEEK_CALLS, marks.DEEPSEEK_CALLS_END),
        ),
    ),
    "deepseek_v31": ToolFormat(
        syntax=HeadedCalls(
            section=marks.DEEPSEEK_CALLS, section_end=marks.DEEPSEEK_CALLS_END,
            call=marks.DEEPSEEK_CALL, call_end=marks.DEEPSEEK_CALL_END,
            heading_end=marks.DEEPSEEK_SEPARATOR,
        ),
        special=marks.DEEPSEEK,
        tags=CallTags(
            trigger=marks.DEEPSEEK_CALL,
            begin=f"{marks.DEEPSEEK_CALL}NAME{marks.DEEPSEEK_SEPARATOR}",
            end=marks.DEEPSEEK_CALL_END, separator="",
            around=(marks.DEEPSEEK_CALLS, marks.DEEPSEEK_CALLS_END),
        ),
    ),
    "kimi_k2": ToolFormat(
        syntax=HeadedCalls(
            section=marks.KIMI_CALLS, section_end=marks.KIMI_CALLS_END, call=marks.KIMI_CALL,
            call_end=marks.KIMI_CALL_END, heading_end=marks.KIMI_ARGUMENTS, named=_numbered,
        ),
        special=marks.KIMI,
    ),
    "granite": ToolFormat(
        syntax=JsonCalls(begins=("<|tool_call|>", "<tool_call>"), end="</tool_call>"),
        special=("<|tool_call|>", *_HERMES),
        tags=_listed("<|tool_call|>[", "]"),
    ),
    "granite-20b-fc": ToolFormat(
        syntax=JsonCalls(begins=("<function_call>",)), special=("<function_call>",),
        tags=CallTags(trigger="<function_call>", begin="<function_call> " + _OBJECT, end="}"),
    ),
    "jamba": ToolFormat(
        syntax=JsonCalls(begins=("<tool_calls>",), end="</tool_calls>"),
        special=("<tool_calls>", "</tool_calls>"),
        tags=_listed("<tool_calls>[\n", "\n]</tool_calls>"),
    ),
    "xlam": ToolFormat(
        syntax=JsonCalls(begins=("[TOOL_CALLS]",), bare=True),
        tags=_listed("[", "]"),
    ),
    "internlm": ToolFormat(
        syntax=JsonCalls(begins=("<|action_start|><|plugin|>",), end="<|action_end|>"),
        special=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        tags=CallTags(
            trigger="<|action_start|><|plugin|>",
            begin='<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ',
            end="}<|action_end|>",
        ),
    ),
    "phi4_mini_json": ToolFormat(
        syntax=JsonCalls(begins=("functools", "<|tool_call|>"), end="<|/tool_call|>"),
        special=("<|tool_call|>", "<|/tool_call|>"),
        tags=_listed("functools[", "]"),
    ),
    "seed_oss": ToolFormat(
        syntax=_SEED, special=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "minimax_m2": ToolFormat(
        syntax=_MINIMAX, special=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "minimax_m3": ToolFormat(syntax=_MINIMAX_M3, special=(_NS, *_HERMES)),
    "deepseek_v32": ToolFormat(syntax=_dsml("function_calls"), special=(marks.DSML,)),
    "deepseek_v4": ToolFormat(syntax=_dsml("tool_calls"), special=(marks.DSML,)),
    "minicpm5": ToolFormat(syntax=_MINICPM),
    "gemma4": ToolFormat(
        syntax=gemma_calls.GemmaCalls(),
        special=(gemma_calls.BEGIN, gemma_calls.END, gemma_calls.QUOTE),
    ),
    "lfm2": ToolFormat(
        syntax=PythonicCalls(begin="<|tool_call_start|>", end="<|tool_call_end|>"),
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "cohere": ToolFormat(
        syntax=JsonCalls(
            begins=("<|START_ACTION|>",), end="<|END_ACTION|>", name_key="tool_name"
        ),
        special=("<|START_ACTION|>", "<|END_ACTION|>"),
        tags=CallTags(
            trigger="", begin='{"tool_name": "NAME", "parameters": ', end="}", separator=",\n",
            around=("<|START_ACTION|>[\n", "\n]<|END_ACTION|>"),
        ),
    ),
    "command_r": ToolFormat(
        syntax=JsonCalls(begins=("Action:\n```json",), end="```", name_key="tool_name"),
        tags=CallTags(
            trigger="", begin='{"tool_name": "NAME", "parameters": ', end="}", separator=",\n",
            around=("Action:\n```json\n[\n", "\n]\n```"),
        ),
    ),
    "apertus": ToolFormat(
        syntax=JsonCalls(begins=("<|tools_prefix|>",), end="<|tools_suffix|>", is_keyed=True),
        special=("<|tools_prefix|>", "<|tools_suffix|>"),
        tags=CallTags(
            trigger="", begin='{"NAME": ', end="}", separator=", ",
            around=("<|tools_prefix|>[", "]<|tools_suffix|>"),
        ),
    ),
    "nemotron": ToolFormat(
        syntax=JsonCalls(begins=("<TOOLCALL>",), end="</TOOLCALL>"),
        special=("<TOOLCALL>", "</TOOLCALL>"),
        tags=_listed("<TOOLCALL>[", "]</TOOLCALL>"),
    ),
    "gigachat3": ToolFormat(
        syntax=JsonCalls(begins=(_GIGACHAT, "<|function_call|>")),
        special=("<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
        tags=CallTags(trigger=_GIGACHAT, begin=_GIGACHAT + "\n" + _OBJECT, end="}", separator=""),
    ),
    "gigachat31": ToolFormat(
        syntax=JsonCalls(begins=("<|function_call|>", _GIGACHAT)),
        special=("<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
        tags=CallTags(
            trigger="<|function_call|>", begin="<|function_call|>" + _OBJECT, end="}", separator=""
        ),
    ),
    "functionary_v31": ToolFormat(
        syntax=HeadedCalls(call="<function=", heading_end=">", call_end="</function>"),
        tags=CallTags(
            trigger="<function=", begin="<function=NAME>", end="</function>", separator=""
        ),
    ),
    "functionary_v32": ToolFormat(
        syntax=RecipientCalls(),
        tags=CallTags(trigger="", begin="NAME\n", end="", separator=">>>"),
    ),
    "solar": ToolFormat(
        syntax=HeadedCalls(
            call="<|tool_call:begin|>", heading_end="<|tool_call:args|>",
            call_end="<|tool_call:end|>", named=_id_and_name,
        ),
        special=("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>",
                 "<|tool_call:end|>"),
    ),
    "openai": ToolFormat(syntax=harmony.HarmonyCalls(), special=harmony.SPECIAL),
})  # fmt: skip

# Names that other engines have for the same.
TOOL_ALIASES: Mapping[str, str] = MappingProxyType({
    "qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json", "llama4_json": "llama3_json", "deepseek_r1": "deepseek_v3",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "granite4": "granite",
    "phi4_mini": "phi4_mini_json", "glm47": "glm45", "internlm2": "internlm",
    "harmony": "openai", "gpt_oss": "openai", "deepseekv32": "deepseek_v32",
    "command_r7b": "cohere", "nemotron_v2": "nemotron",
})  # fmt: skip

_THINK = ReasoningFormat(opens=("<think>",), closes=("</think>",), special=("<think>", "</think>"))

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType({
    "qwen3": _THINK,
    "think": _THINK,
    "deepseek_r1": ReasoningFormat(
        opens=("<think>",), closes=("</think>",), begins_open=True, special=("<think>", "</think>"),
    ),
    "granite": ReasoningFormat(
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
    ),
    "mistral": ReasoningFormat(
        opens=("[THINK]",), closes=("[/THINK]",), special=("[THINK]", "[/THINK]"),
    ),
    "seed_oss": ReasoningFormat(
        opens=("<seed:think>",), closes=("</seed:think>",),
        special=("<seed:think>", "</seed:think>"),
    ),
    "cohere": ReasoningFormat(
        opens=("<|START_THINKING|>",), closes=("<|END_THINKING|>",),
        special=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "minimax_m3": ReasoningFormat(
        opens=("<mm:think>",), closes=("</mm:think>",), special=("<mm:think>", "</mm:think>"),
    ),
    "gemma4": ReasoningFormat(
        opens=("<|channel>thought",), closes=("<channel|>",), special=("<|channel>", "<channel|>"),
    ),
    "apertus": ReasoningFormat(
        opens=("<|inner_prefix|>",), closes=("<|inner_suffix|>",),
        special=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "openai_gptoss": harmony.HARMONY,
})  # fmt: skip

REASONING_ALIASES: Mapping[str, str] = MappingProxyType({
    "glm45": "think", "deepseek_v3": "think", "kimi_k2": "think", "hunyuan_a13b": "think",
    "ernie45": "think", "olmo3": "think", "nemotron_v3": "think", "step3": "think",
    "minimax_m2": "deepseek_r1", "harmony": "openai_gptoss", "gpt_oss": "openai_gptoss",
})  # fmt: skip
