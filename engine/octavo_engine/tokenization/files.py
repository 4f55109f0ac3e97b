"""Which files of a folder can be its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FILES: Final = (
    "neither tokenizer.json nor tokenizer.model (SentencePiece) nor a *.tiktoken file"
)


def other_files(folder: Path) -> list[Path]:
    """What may be read in place of a missing tokenizer.json, the best first."""
    found = [
        folder / "tokenizer.model",
        folder / "tiktoken.model",
        *sorted(folder.glob("*.tiktoken")),
    ]
    return [path for path in found if path.is_file()]


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").exists() or bool(other_files(folder))
