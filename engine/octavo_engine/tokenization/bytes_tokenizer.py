"""A tokenizer without files, for the simulator: every byte is a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import ConfigError, InvalidRequest
from octavo_engine.tokenization.messages import checked_messages
from octavo_engine.tokenization.tokenizer import check_length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_engine.tokenization.tokenizer import Template

BOS = 256
EOS = 257


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 begins a text and 257 ends it; the rest are made-up words."""

    strips_first_space = False
    bos_token_id: int | None = BOS
    eos_token_ids: tuple[int, ...] = (EOS,)
    special_ids = frozenset((BOS, EOS))

    def __init__(self, vocab_size: int = 512) -> None:
        if vocab_size <= EOS:
            raise ConfigError(
                f"a byte vocabulary needs at least {EOS + 1} tokens; got {vocab_size}"
            )
        self.vocab_size = vocab_size
        self.chat_template: Template | None = PlainTemplate()

    def least_tokens(self, text: str) -> int:
        return len(text.encode("utf-8", "replace"))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        try:
            ids = list(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("the text is not valid Unicode", param="prompt") from None
        return [BOS, *ids] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_parts(
        self, first: str, second: str | None = None, *, max_length: int | None = None
    ) -> tuple[list[int], list[int]]:
        parts = [self.encode(first)]
        if second is not None:
            parts.append(self.encode(second))
        while max_length is not None and sum(map(len, parts)) > max_length:
            max(parts, key=len).pop()
        types = [index for index, part in enumerate(parts) for _ in part]
        return [token for part in parts for token in part], types

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        text = PlainTemplate().render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return self.encode(text)

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
        text = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        if max_tokens is not None:
            check_length(self, text, max_tokens, "messages")
        return text, self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}",
                    param="tokens",
                )
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(i) for i in ids if i not in skipped)
        return raw.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        return self.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < BOS:
            return bytes((token_id,))
        if token_id == BOS:
            return b"<s>"
        if token_id == EOS:
            return b"</s>"
        return _word(token_id - EOS - 1) if token_id < self.vocab_size else b""


class PlainTemplate:
    """Each message under its role's name."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        checked = checked_messages(messages, keep_parts=False)
        turns = [f"<|{m['role']}|>\n{m.get('content') or ''}\n" for m in checked]
        if continue_final_message:
            return "".join(turns)[:-1]
        return "".join(turns) + ("<|assistant|>\n" if add_generation_prompt else "")


def _word(number: int) -> bytes:
    """A space and two letters or more: ' aa', ' ba', …"""
    letters = bytearray(b" ")
    while True:
        number, letter = divmod(number, 26)
        letters.append(ord("a") + letter)
        if not number:
            break
    return bytes(letters) if len(letters) > 2 else bytes(letters) + b"a"
