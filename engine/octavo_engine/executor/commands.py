"""What rank 0 has the other ranks do, one message of the ring each: a byte, then its arguments."""

from __future__ import annotations

from enum import IntEnum

# A rank that reaches a barrier so much later than the others counts as hung: instructions between
# two barriers take milliseconds.
BARRIER_PATIENCE_S = 10.0


class Command(IntEnum):
    """The first byte of a message."""

    STEP = 1  # a StepPlan
    POISON = 2  # block ids as int32
    RELEASE_KV = 3
    RESTORE_KV = 4

    def message(self, body: bytes = b"") -> bytes:
        return bytes((self,)) + body
