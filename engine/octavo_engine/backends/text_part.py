"""The text model inside the checkpoint of one that also sees pictures, under its plain names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.renamed_tensors import RenamedTensors

if TYPE_CHECKING:
    from octavo_engine.weights.checkpoint import Checkpoint

# As files name it, longest first, and as the text model alone would.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


class TextPart(RenamedTensors):
    """A checkpoint of which only the language model's tensors are visible."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        names = {name: _plain_name(name) for name in checkpoint.names()}
        super().__init__(
            checkpoint, {plain: name for name, plain in names.items() if plain is not None}
        )


def _plain_name(name: str) -> str | None:
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    is_text = name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))
    return name if is_text else None
