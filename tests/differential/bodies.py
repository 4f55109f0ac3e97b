"""Bodies for every endpoint that streams, with whatever may stand in them, drawn at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.server.settings import ServerSettings
from tests.differential.wishes import SCHEMA
from tests.fakes.talking import NOW, OSLO, THOUGHT, TOOLS

if TYPE_CHECKING:
    from random import Random

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, TOKENS = "/v1/responses", "/v1/messages", "/inference/v1/generate"
PATHS = (CHAT, CHAT, CHAT, COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES, TOKENS)
RESUMED = (CHAT, COMPLETIONS)

_PYTHONIC = '[get_weather(city="Oslo", days=[1, 2]), get_time()]'
_EMOJI = "Der Fuchs 🦊 läuft über 日本, né? 👩‍🚀 end."


class Speaker(NamedTuple):
    """How the model writes, and how the server reads it."""

    texts: tuple[str, ...]
    settings: ServerSettings
    template: str | None = None


SPEAKERS: dict[str, Speaker] = {
    "hermes": Speaker(
        (
            _EMOJI,
            f"{THOUGHT}{_EMOJI}\n\nMore: 🙂. ",
            f"<think>ä</think>{OSLO}\n {NOW}\n done ",
            f"Let me see.\n{OSLO}",
            f"{NOW}",
            "<think>never closed 🦊",
        ),
        ServerSettings(tool_call_parser="hermes", reasoning_parser="qwen3"),
    ),
    "plain": Speaker(
        (_EMOJI, '{"city": "Oslo", "n": 12}', "no end in sight, " * 9),
        ServerSettings(tool_call_parser="none", reasoning_parser="none"),
    ),
    "pythonic": Speaker(
        (_PYTHONIC, f"<think>so</think>\n\n{_PYTHONIC} ", "[1] is a footnote: é", _EMOJI),
        ServerSettings(tool_call_parser="pythonic", reasoning_parser="deepseek_r1"),
    ),
    "llama": Speaker(
        (
            '{"name": "get_weather", "parameters": {"city": "Älesund"}}; {"name": "get_time", '
            '"parameters": {}}',
            '{"city": "no call"}',
            _EMOJI,
        ),
        ServerSettings(tool_call_parser="llama3_json", reasoning_parser="none"),
    ),
    "coder": Speaker(
        (
            "<think>é\n</think>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nÅs\n"
            "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call> ok",
            _EMOJI,
        ),
        ServerSettings(tool_call_parser="qwen3_coder", reasoning_parser="think"),
    ),
    "mistral": Speaker(
        (
            '[THINK]hm é[/THINK]Hello. [TOOL_CALLS]get_weather[ARGS]{"city": "Østre"}[TOOL_CALLS]'
            "get_time[ARGS]{}",
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        ),
        ServerSettings(tool_call_parser="mistral", reasoning_parser="mistral"),
    ),
    "harmony": Speaker(
        (
            "<|channel|>analysis<|message|>Which city? 🦊<|end|><|start|>assistant<|channel|>final"
            "<|message|>It rains ☔.",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
            "<|channel|>final<|message|>ü",
            _EMOJI,
        ),
        ServerSettings(
            tool_call_parser="openai", reasoning_parser="openai_gptoss",
            trust_request_chat_template=True,
        ),
        template="<|start|>user<|message|>{{ messages[-1].content }}<|end|><|start|>assistant",
    ),
}  # fmt: skip


class Bodies:
    """Draws them for one speaker."""

    def __init__(self, rng: Random, speaker: Speaker) -> None:
        self._rng = rng
        self._speaker = speaker

    def body(self) -> tuple[str, dict[str, Any]]:
        """A path, and a body without `stream`."""
        path = self._rng.choice(PATHS)
        make = {
            CHAT: self._chat, COMPLETIONS: self._completion, RESPONSES: self._response,
            MESSAGES: self._message, TOKENS: self._tokens,
        }  # fmt: skip
        return path, make[path]()

    def _some(self, wishes: dict[str, tuple[float, Any]]) -> dict[str, Any]:
        return {name: value for name, (odds, value) in wishes.items() if self._rng.random() < odds}

    def _stop(self) -> str:
        text = self._rng.choice(self._speaker.texts)
        begin = self._rng.randrange(len(text))
        return text[begin : begin + self._rng.randint(1, 6)]

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        return {
            "temperature": rng.choice([0, 0.8, 1.0, 1.0, 1.3]),
            "seed": rng.choice([rng.randint(-9, 99), 2**62 + 1]),
        } | self._some(
            {
                "top_p": (0.15, 0.9),
                "top_k": (0.15, rng.choice([1, 5])),
                "stop": (0.3, [self._stop() for _ in range(rng.randint(1, 3))]),
                "include_stop_str_in_output": (0.15, True),
                "stop_token_ids": (0.15, [rng.choice(b"aeo.<{")]),
                "ignore_eos": (0.15, True),
                "skip_special_tokens": (0.15, False),
                "logit_bias": (0.1, {str(rng.choice(b"ae .")): rng.choice([-100, 3])}),
                "bad_words": (0.05, ["er", "Oslo"]),
                "presence_penalty": (0.1, 0.6),
                "repetition_penalty": (0.1, 1.1),
            }
        )

    def _generation(self) -> dict[str, Any]:
        """What chats, texts and tokens share."""
        rng = self._rng
        max_tokens = rng.choice([1, 4, 20, 60, 150])
        return (
            {"max_tokens": max_tokens}
            | self._sampling()
            | self._some(
                {
                    "n": (0.3, rng.choice([2, 3])),
                    "min_tokens": (0.15, rng.randint(0, max_tokens)),
                    "min_p": (0.1, 0.01),
                    "allowed_token_ids": (0.05, list("🦊éab <>".encode())),
                    "return_token_ids": (0.2, True),
                    "return_tokens_as_token_ids": (0.1, True),
                    "cache_salt": (0.1, "s"),
                    "repetition_detection": (0.1, {"max_pattern_size": 2, "min_count": 2}),
                }
            )
        )

    def _shape(self) -> dict[str, Any]:
        rng = self._rng
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        return rng.choice(
            [
                {"response_format": schema},
                {"response_format": {"type": "json_object"}},
                {"structured_outputs": {"choice": ["yes 🦊", "no", "not ä"]}},
                {"structured_outputs": {"regex": "(🦊|ä|b){2,12}c?"}},
                {"structured_outputs": {"grammar": 'root ::= "((" root "))" | "é"'}},
            ]
        )

    def _question(self) -> str:
        return self._rng.choice(["weather?", "Wie geht's? 🦊", "a", "tell me " * 12, "x" * 40])

    def _chat(self) -> dict[str, Any]:
        rng = self._rng
        body = {"messages": [{"role": "user", "content": self._question()}]} | self._generation()
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": rng.choice([0, 2])}
        body |= self._some(
            {
                "include_reasoning": (0.1, False),
                "thinking_token_budget": (0.1, rng.choice([0, 3, 50])),
                "return_prompt_text": (0.1, True),
                "echo": (0.1, True),
                "stream_options": (0.3, {"continuous_usage_stats": True}),
            }
        )
        choice = rng.random()
        if choice < 0.45:
            body["tools"] = TOOLS
            body |= self._some(
                {
                    "tool_choice": (
                        0.5, rng.choice(["auto", "required", "none", {
                            "type": "function", "function": {"name": "get_weather"}}]),
                    ),
                    "parallel_tool_calls": (0.3, False),
                }
            )  # fmt: skip
        elif choice < 0.5:
            body["functions"] = [tool["function"] for tool in TOOLS]
        if rng.random() < 0.2:
            body |= self._shape()
        if rng.random() < 0.1:
            begun = rng.choice(["Der Fu", "<think>hm", "🦊"])
            body["messages"].append({"role": "assistant", "content": begun})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self._speaker.template is not None:
            body["chat_template"] = self._speaker.template
        return body

    def _completion(self) -> dict[str, Any]:
        rng = self._rng
        prompts: list[Any] = [self._question() + "\x03" for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        if rng.random() < 0.2:
            prompts[0] = list(prompts[0].encode())
        body = {"prompt": prompts if len(prompts) > 1 else prompts[0]} | self._generation()
        body |= self._some({
            "logprobs": (0.35, rng.choice([0, 1, 3])),
            "echo": (0.3, True),
            "stream_options": (0.3, {"continuous_usage_stats": True}),
        })  # fmt: skip
        if rng.random() < 0.15:
            body |= self._shape()
        return body

    def _response(self) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"input": self._question(), "store": False} | self._sampling()
        body["max_output_tokens"] = rng.choice([1, 4, 20, 60, 150])
        if rng.random() < 0.45:
            body["tools"] = [{"type": "function", **tool["function"]} for tool in TOOLS]
            body |= self._some({
                "tool_choice": (0.4, rng.choice(["required", "none"])),
                "parallel_tool_calls": (0.3, False),
            })  # fmt: skip
        if rng.random() < 0.35:
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        if rng.random() < 0.15:
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        return body

    def _message(self) -> dict[str, Any]:
        rng = self._rng
        sampling = self._sampling()
        same = ("temperature", "seed", "top_p", "top_k", "ignore_eos", "repetition_penalty")
        body: dict[str, Any] = {name: sampling[name] for name in same if name in sampling}
        body |= {"messages": [{"role": "user", "content": self._question()}]}
        body["max_tokens"] = rng.choice([1, 4, 20, 60, 150, 9999])
        if stop := sampling.get("stop"):
            body["stop_sequences"] = stop
        if rng.random() < 0.45:
            body["tools"] = [
                {"name": tool["function"]["name"], "input_schema": {"type": "object"}}
                for tool in TOOLS
            ]
            body |= self._some({"tool_choice": (0.4, {"type": rng.choice(["any", "none"])})})
        return body | self._some(
            {"thinking": (0.2, {"type": "enabled", "budget_tokens": rng.choice([3, 50])})}
        )

    def _tokens(self) -> dict[str, Any]:
        params = self._generation()
        for name in ("return_token_ids", "cache_salt"):
            params.pop(name, None)
        params |= self._some({"logprobs": (0.4, 1)})
        return {
            "token_ids": list((self._question() + "\x03").encode()), "sampling_params": params,
        }  # fmt: skip
