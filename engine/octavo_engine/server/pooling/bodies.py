"""The bodies of the pooling endpoints, under OpenAI's, Cohere's, Jina's and vLLM's names."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo_engine.server.openai.schemas import ChatMessageBody, ConversationFields

Side = Literal["left", "right"]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]
PoolingTaskName = Literal["embed", "token_embed", "classify", "token_classify", "score"]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class PoolingFields(msgspec.Struct, kw_only=True):
    """What all of them share."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None  # -1: as many as the model takes
    truncation_side: Side | None = None  # where tokens are cut off; right if not given
    priority: int | None = None
    cache_salt: str | None = None  # of no effect: nothing of a pooled text is kept
    use_activation: bool | None = None  # normalise, or softmax and sigmoid
    activation: bool | None = None  # older names of the same
    softmax: bool | None = None
    normalize: bool | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    mm_processor_kwargs: Any = None  # not honoured: text only

    @property
    def activate(self) -> bool | None:
        names = (self.use_activation, self.activation, self.softmax, self.normalize)
        return next((value for value in names if value is not None), None)


class TextFields(PoolingFields, kw_only=True):
    """Texts, token ids, or a conversation."""

    input: str | list[str | int | list[int]] | None = None
    messages: list[ChatMessageBody] | None = None
    prompt_name: str | None = None  # of a prompt of the model's, to go before each text
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation(self) -> ConversationFields:
        return ConversationFields(
            messages=self.messages or [],
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class EncodingFields(TextFields, kw_only=True):
    """How the numbers are to be written."""

    encoding_format: EncodingFormat | None = None
    embed_dtype: EmbedDtype | None = None  # of base64 and bytes
    endianness: Endianness | None = None
    dimensions: int | None = None


class EmbeddingRequest(EncodingFields, kw_only=True):
    """OpenAI's, with vLLM's fields."""


class PoolingBody(EncodingFields, kw_only=True):
    """vLLM's. No task: what the model gives for every token, if it can, or for the whole text."""

    task: PoolingTaskName | None = None


class ClassifyRequest(TextFields, kw_only=True):
    """vLLM's."""


class CohereContent(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class CohereInput(msgspec.Struct, kw_only=True):
    content: list[CohereContent]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """Cohere's, version 2."""

    model: str | None = None
    input_type: str | None = None  # search_query, search_document, …: chooses the model's prompt
    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    images: list[str] | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = None
    priority: int | None = None


class ScoringFields(PoolingFields, kw_only=True):
    """Pairs of texts."""

    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Document(msgspec.Struct, kw_only=True):
    text: str


Texts = str | list[str]


class ScoreRequest(ScoringFields, kw_only=True):
    """Both sides under any one pair of names: one with one, one with many, or many with as many."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None


class RerankRequest(ScoringFields, kw_only=True):
    """Jina's and Cohere's."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None  # 0: all
    return_documents: bool | None = None  # true if not given
    # Cohere's: documents as objects are read by their text, and these name nothing else.
    rank_fields: list[str] | None = None
    max_chunks_per_doc: int | None = None
