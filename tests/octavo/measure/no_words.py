"""A tokenizer that holds nothing, for models whose prompts are token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

if TYPE_CHECKING:
    from pathlib import Path


def write_tokenizer(folder: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    words.decoder = ByteLevel()
    words.save(str(folder / "tokenizer.json"))
