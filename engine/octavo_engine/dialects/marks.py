"""Marks that are written in letters of their own, spelled once."""
# ruff: noqa: RUF001

DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"
DEEPSEEK_CALLS_END = "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_ASSISTANT = "<｜Assistant｜>"
DEEPSEEK = (
    DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR,
)  # fmt: skip

DSML = "｜DSML｜"

KIMI_CALLS = "<|tool_calls_section_begin|>"
KIMI_CALLS_END = "<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>"
KIMI_CALL_END = "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI = (KIMI_CALLS, KIMI_CALLS_END, KIMI_CALL, KIMI_CALL_END, KIMI_ARGUMENTS)
