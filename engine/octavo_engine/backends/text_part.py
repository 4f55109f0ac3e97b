"""The text model inside the checkpoint of one that also sees pictures, under its plain names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor

# As files name it, longest first, and as the text model alone would.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


class TextPart:
    """A checkpoint of which only the language model's tensors are visible."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored_names = {
            plain: name for name in checkpoint.names() if (plain := _plain_name(name)) is not None
        }

    def names(self) -> Iterable[str]:
        return self._stored_names

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        return self._checkpoint.read(self._stored_names.get(name, name), shape)

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes


def _plain_name(name: str) -> str | None:
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    is_text = name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))
    return name if is_text else None
