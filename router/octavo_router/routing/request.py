"""What routing knows of a request: read from its body once, without tokenising."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.residency.api import Scan


@dataclass(slots=True)
class RouteRequest:
    """One request to be placed. Made once per request: plain slots, no properties."""

    model: str = ""  # as the client named it; "" for none
    pool: str = ""  # that serves it, aliases and weights settled
    revision: str = ""  # "" for any; set where a canary's weights chose one
    adapter: str = ""
    needs_adapter: bool = False  # only who has it may serve it: this router does the loading
    keys: bytes = b""  # the prompt's route keys: packed u64, one per 64 bytes of prompt
    prompt_bytes: int = 0
    prompt_tokens: int = 0  # exact for token-id prompts, else an estimate from bytes
    max_tokens: int = 0  # requested, or the usual guess; of each answer
    num_answers: int = 1
    stream: bool = False
    priority: int = 0
    tenant: str = ""
    session: str = ""
    request_id: str = ""
    explain: bool = False
    subset: tuple[str, ...] = ()  # only these endpoints (host:port), where a gateway says so
    placed_at: float = 0.0  # monotonic, of the latest attempt; 0 where nobody looked at a clock
    names: Sequence[bytes] = ()  # a few of its keys: residency.underway fills them in

    def take(self, scan: Scan) -> None:
        """What its body says of the prompt and of the answers."""
        self.keys = scan.keys
        self.prompt_bytes = scan.prompt_bytes
        self.prompt_tokens = scan.num_prompt_ids
        self.max_tokens = scan.max_tokens
        self.num_answers = scan.num_answers
        self.stream = scan.stream
        self.priority = scan.priority
