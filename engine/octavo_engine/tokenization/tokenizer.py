"""Text to token ids and back: the interface of every tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from octavo_engine.errors import ContextLengthExceeded, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Template(Protocol):
    """A conversation as the text that the model was trained on."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Raises InvalidRequest(param="messages") when the conversation does not fit it."""


class Tokenizer(Protocol):
    """Safe to share between threads. Raises InvalidRequest on text or ids that cannot be."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer, the main one first."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: left out of text where special tokens are skipped."""

    @property
    def chat_template(self) -> Template | None: ...

    @property
    def strips_first_space(self) -> bool:
        """Whether the space before the first word belongs to the vocabulary, not to the text."""

    def least_tokens(self, text: str) -> int:
        """A quick lower bound of its tokens, special ones aside. 0 where nothing is known."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """`allow_special=False`: text that spells a control token stays text."""

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]: ...

    def encode_parts(
        self, first: str, second: str | None = None, *, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of a text, or of a pair as the model wants them written, special tokens included;
        and which of the two each is of. With `max_length` the texts are cut, the longer one first,
        and the special tokens stay."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The rendered conversation; only the template's own control tokens become control ids."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: Template,
        add_special_tokens: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> tuple[str, list[int]]:
        """As `encode_chat` by any template, with the text that was rendered. Raises
        ContextLengthExceeded, unread, for one that surely has more than `max_tokens`."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """The token alone; bytes that are no whole character become U+FFFD."""

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary spells it, such as "Ġhello"; empty for no token."""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text. Empty for ids that stand for nothing."""


class TokenizerFiles(Protocol):
    """Where a tokenizer comes from; weights.source.ModelFiles is one."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def generation_config(self) -> dict[str, Any]: ...
    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None: ...
    def with_tokenizer(self, reference: str) -> TokenizerFiles: ...


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ModelError when the tokenizer has ids that the model's table does not."""
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {vocab_size}: "
            "they do not belong together (check --tokenizer)"
        )


def check_length(tokenizer: Tokenizer, text: str, most: int, param: str) -> None:
    """Raises ContextLengthExceeded if the text surely has more than `most` tokens."""
    if len(text) <= most // 4:  # a character has four bytes at most, a token one at least
        return
    least = tokenizer.least_tokens(text)
    if least > most:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {most} tokens, the answer included. However, "
            f"your prompt has {len(text)} characters, which are at least {least} tokens. Please "
            "reduce its length.",
            param=param,
        )


def ends_of_text(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids that end an answer: the model's, `eos_token_ids`, first, then the tokenizer's own,
    which a fine-tuned model's config often does not know."""
    return tuple(dict.fromkeys((*eos_token_ids, *tokenizer.eos_token_ids)))
