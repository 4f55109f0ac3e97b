"""What an engine core says, kept for a test to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.errors import OctavoError
    from octavo_engine.state.outputs import StepOutput


class Heard:
    """A Listener."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.refused: list[str] = []

    def on_step(self, step: StepOutput) -> None:
        for output in step.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    def on_refused(self, sequence_id: str, error: OctavoError) -> None:
        self.refused.append(str(error))

    def on_lost(self, error: OctavoError) -> None:
        self.refused.append(str(error))
