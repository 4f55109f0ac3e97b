"""How few tokens a text can have, known from its bytes: what is surely too long is never read.

A token stands for so many bytes at most. That bounds the tokens of a text only where none of it is
lost on the way to them, so what a tokenizer drops, joins or shortens is looked for first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import models

from octavo_engine.tokenization.token_pieces import Spelling, byte_of_character

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import tokenizers
    from tokenizers import AddedToken

_COMPOSED = 3  # times shorter is a text at most after NFC
_LOSSLESS_CUTS = ("ByteLevel", "Digits", "Metaspace", "Split", "Sequence", "Punctuation")


class LeastTokens:
    """The bound for one tokenizer."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, added: Iterable[AddedToken], spelling: Spelling
    ) -> None:
        # A token that swallows the white space around it may stand for any amount of it.
        self._counts_space = not any(token.lstrip or token.rstrip for token in added)
        self._longest = 0  # bytes of a token; 0: nothing can be said
        factor = _shrinking(_fields(tokenizer.normalizer))
        vocab = tokenizer.get_vocab()
        keeps_all = _keeps_all(_fields(tokenizer.pre_tokenizer))
        self._uncounted = _unspelled(tokenizer.model, vocab, spelling)  # these get lost
        if factor and keeps_all and len(self._uncounted) < 256:
            length = _num_bytes if spelling is Spelling.BYTE_LEVEL else _num_utf8
            self._longest = factor * max(map(length, vocab))

    def __call__(self, text: str) -> int:
        if not self._longest:
            return 0
        counted = text if self._counts_space else "".join(text.split())
        num_bytes = len(counted.encode("utf-8", "replace").translate(None, self._uncounted))
        return -(-num_bytes // self._longest)


def _shrinking(normalizer: dict[str, Any] | None) -> int:
    """How many times shorter it can make a text; 0: any."""
    match normalizer:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "NFC"}:
            return _COMPOSED
        case {"type": "Replace", "pattern": {"String": " "}, "content": str(content)} if content:
            return 1
        case {"type": "Sequence", "normalizers": list(steps)}:
            factor = 1
            for step in steps:
                factor *= _shrinking(step)
            return factor
    return 0


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer.get("behavior") == "Removed":
        return False
    inner = pre_tokenizer.get("pretokenizers") or ()
    return pre_tokenizer.get("type") in _LOSSLESS_CUTS and all(map(_keeps_all, inner))


def _unspelled(model: object, vocab: Mapping[str, int], spelling: Spelling) -> bytes:
    """Bytes that no token stands for, so that they are left out or many become one unknown; all of
    them where that is not so simple."""
    if isinstance(model, models.BPE):
        if spelling is Spelling.BYTE_LEVEL:
            return bytes(byte for name, byte in byte_of_character().items() if name not in vocab)
        if model.byte_fallback:
            return bytes(byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab)
    return bytes(range(256))


def _fields(part: Any) -> dict[str, Any] | None:
    if part is None:
        return None
    fields: dict[str, Any] = json.loads(part.__getstate__())
    return fields


def _num_bytes(name: str) -> int:
    """A character is a byte, but for tokens that were added as they are."""
    return len(name) if max(name, default="") < "\u0144" else _num_utf8(name)


def _num_utf8(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
