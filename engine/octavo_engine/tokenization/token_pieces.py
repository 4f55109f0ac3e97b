"""What each token adds to the text, in bytes, by the kind of vocabulary it comes from."""

from __future__ import annotations

import json
import re
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNDERSCORE = "\u2581"
_CONTINUES = "##"


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"  # each byte is a printable character
    WORDPIECE = "wordpiece"  # a word's later pieces begin with ##
    SENTENCEPIECE = "sentencepiece"  # the space is U+2581, other bytes are <0xAB>


class PieceRules(NamedTuple):
    """How a vocabulary spells text."""

    spelling: Spelling
    strips_first_space: bool

    def to_bytes(self, token: str) -> bytes:
        if self.spelling is Spelling.BYTE_LEVEL:
            table = byte_of_character()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
            return token.encode("utf-8", "replace")  # an added token may hold any text
        if self.spelling is Spelling.WORDPIECE:
            rest = token.removeprefix(_CONTINUES)
            return (rest if rest != token else f" {token}").encode("utf-8", "replace")
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_UNDERSCORE, " ").encode("utf-8", "replace")


def piece_rules(tokenizer: tokenizers.Tokenizer, where: str) -> PieceRules:
    """Read from the tokenizer's decoder; raises ModelError for one that is not known."""
    if tokenizer.decoder is None:
        raise ModelError(f"{where} has no decoder: ids cannot be turned back into text")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(Spelling.BYTE_LEVEL, strips_first_space=False)
    if kinds == ["WordPiece"] and steps[0].get("prefix") == _CONTINUES:
        return PieceRules(Spelling.WORDPIECE, strips_first_space=True)
    if kinds == ["Metaspace"]:
        return PieceRules(Spelling.SENTENCEPIECE, steps[0].get("prepend_scheme") != "never")
    if all(map(_is_sentencepiece, steps)) and "Replace" in kinds:
        return PieceRules(Spelling.SENTENCEPIECE, strips_first_space="Strip" in kinds)
    raise ModelError(f"{where} has the decoder {'+'.join(kinds)}, which is not supported")


def _is_sentencepiece(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
            return True
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return True
    return False


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}
