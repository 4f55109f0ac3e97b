"""The bodies that clients send, under OpenAI's and vLLM's names. Fields unknown to us are accepted.

Fields typed Any are documented elsewhere but not honoured here yet: `unsupported.py` decides which
of their values change nothing and which must be refused.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo_engine.state.sampling_params import RepetitionDetection  # noqa: TC001  (msgspec reads)

NEXT_TURN = "?"  # stands for whatever a client will say


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def wants_sums(self) -> bool:
        """Usage with every chunk, unless none is wanted at all."""
        return bool(self.continuous_usage_stats) and self.include_usage is not False


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None  # reported in place of the likeliest tokens
    stream_interval: int | None = None  # tokens worth an event, if above the server's own
    logits_processors: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_control: Any = None  # how long its KV blocks are retained after its end
    prompt_cache_retention: Any = None
    session_id: str | None = None  # whose these blocks are, too
    prefetch: bool | None = None  # only brings its KV blocks back from tiers
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    request_id: str | None = None
    spaces_between_special_tokens: bool | None = None  # fits either way: none are ever put there
    response_format: Any = None
    structured_outputs: Any = None
    repetition_detection: RepetitionDetection | None = None
    use_beam_search: bool | None = None  # n is the number of beams; temperature has no effect
    length_penalty: float | None = None  # of beams: above 1 favours long answers
    # not honoured yet
    best_of: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None
    return_token_offsets: bool | None = None  # of no effect but where prompts are only rendered


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    thinking_token_budget: int | None = None  # -1: no limit; any other is for chats


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: dict[str, Any] | str | None = None
    input_audio: dict[str, Any] | None = None
    audio_url: dict[str, Any] | str | None = None
    uuid: str | None = None  # by which a picture or sound may be named once it was sent
    thinking: str | None = None


class ChatMessageBody(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # as before there were tool_calls
    reasoning: str | None = None
    reasoning_content: str | None = None


class ConversationFields(msgspec.Struct, kw_only=True):
    """A conversation and how it becomes a prompt; no body of its own, but a part of two."""

    messages: list[ChatMessageBody]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    messages: list[ChatMessageBody]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: list[dict[str, Any]] | None = None  # tools of old
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None  # of each answer; -1: no limit
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # not honoured yet
    modalities: Any = None

    @property
    def conversation(self) -> ConversationFields:
        return ConversationFields(
            messages=self.messages,
            tools=self.tools,
            documents=self.documents,
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def continued(self, answer: str) -> ConversationFields:
        """Its next turn, with something said in it."""
        following = (
            ChatMessageBody(role="assistant", content=answer), ChatMessageBody(role="user",
            content=NEXT_TURN)
        )  # fmt: skip
        return msgspec.structs.replace(
            self.conversation,
            messages=[*self.messages, *following],
            add_generation_prompt=None,
            continue_final_message=None,
        )


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessageBody] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation(self) -> ConversationFields:
        return ConversationFields(
            messages=self.messages or [],
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
