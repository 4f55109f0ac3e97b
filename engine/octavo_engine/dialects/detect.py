"""Which dialect a model speaks, told from its chat template: the words it puts around calls."""

from __future__ import annotations

from typing import NamedTuple

from octavo_engine.dialects import marks


class Detected(NamedTuple):
    """Names of formats; None where the template does not show one."""

    tools: str | None
    reasoning: str | None


def detect(chat_template: str) -> Detected:
    """Pure; the first sign found wins, so the more particular ones come first."""
    return Detected(_tools(chat_template), _reasoning(chat_template))


def _is_harmony(text: str) -> bool:
    return "<|channel|>" in text and "<|start|>assistant" in text


def _tools(text: str) -> str | None:
    if _is_harmony(text):
        return "openai"
    if "[TOOL_CALLS]" in text:
        return "mistral_args" if "[ARGS]" in text else "mistral"
    if marks.DEEPSEEK_CALLS in text:
        return "deepseek_v3" if "```json" in text else "deepseek_v31"
    if marks.KIMI_CALLS in text:
        return "kimi_k2"
    if "<arg_key>" in text:
        return "glm45"
    if "<function=" in text and "<parameter=" in text:
        return "qwen3_coder"
    if "<|action_start|>" in text:
        return "internlm"
    if "functools[" in text or ("<|tool|>" in text and "<|/tool|>" in text):
        return "phi4_mini_json"
    if "<tool_calls>" in text:
        return "jamba"
    if "<|tool_call|>" in text:
        return "granite"
    if "<|python_start|>" in text:
        return "llama4_pythonic"
    if "<tool_call>" in text:
        return "hermes"
    if "<function_call>" in text:
        return "granite-20b-fc"
    if "<|start_header_id|>" in text and "tools" in text:
        if '"parameters"' in text or "<|python_tag|>" in text:
            return "llama3_json"
        return "pythonic"
    return None


def _reasoning(text: str) -> str | None:
    if _is_harmony(text):
        return "openai_gptoss"
    if "[THINK]" in text:
        return "mistral"
    if "<seed:think>" in text:
        return "seed_oss"
    if "</think>" in text or "<think>" in text:
        # These drop the thoughts of earlier turns and let the model think in every one.
        return (
            "deepseek_r1"
            if marks.DEEPSEEK_ASSISTANT in text and "thinking" not in text
            else "qwen3"
        )
    if "Here is my thought process" in text:
        return "granite"
    return None
