"""The tower and the projector of a model that hears, under the names that their pages ask for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo_engine.backends.renamed_tensors import RenamedTensors
from octavo_engine.models.speech_names import SpeechNames

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor

_TOWER = re.compile(r"^(?:model\.)?audio_tower\.")
_PROJECTOR = (
    (re.compile(r"^(?:model\.)?audio_tower\.layer_norm\."), "projector.norm."),
    (re.compile(r"^(?:model\.)?multi_modal_projector\.linear\."), "projector.linear_1."),
)


class HearingPart:
    """A checkpoint of which only what hears is visible. The tower's last norm is of what a token of
    the language model has, so it is the projector's."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tower, projector = {}, {}
        for name in checkpoint.names():
            for pattern, ours in _PROJECTOR:
                if pattern.match(name):
                    projector[pattern.sub(ours, name)] = name
                    break
            else:
                if _TOWER.match(name):
                    tower[_TOWER.sub("model.encoder.", name)] = name
        self._tower = SpeechNames(RenamedTensors(checkpoint, tower))
        self._projector = RenamedTensors(checkpoint, projector)

    def names(self) -> Iterable[str]:
        return [*self._tower.names(), *self._projector.names()]

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        part = self._projector if name.startswith("projector.") else self._tower
        return part.read(name, shape)

    @property
    def total_bytes(self) -> int:
        return self._projector.total_bytes
