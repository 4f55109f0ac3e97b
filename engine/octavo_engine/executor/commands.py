"""What rank 0 has the other ranks do, one message of the ring each: a byte, then its arguments.

With several stages a step's rows go from rank to rank by rings of their own, a message for each
step: float32, as many rows as the step has tokens; none where a stage refused the step.
"""

from __future__ import annotations

from enum import IntEnum

# A rank that reaches a barrier so much later than the others counts as hung: instructions between
# two barriers take milliseconds.
BARRIER_PATIENCE_S = 10.0
# The same on a GPU, where it counts for a whole step, and a kernel may be compiled on the way.
DEVICE_PATIENCE_S = 30.0
# So often a rank says that it is there: between stages a message may take as long as a step.
ALIVE_S = 1.0


def stage_of(rank: int, size: int) -> int:
    """Rank 0 is the last stage, which samples; the others stand before it in their order."""
    return (rank - 1) % size


class Command(IntEnum):
    """The first byte of a message."""

    STEP = 1  # a StepPlan
    POISON = 2  # block ids as int32
    RELEASE_KV = 3
    RESTORE_KV = 4
    PLACE_ADAPTER = 5  # a slot and an adapter's number as int32
    FORGET_ADAPTERS = 6  # their numbers as int32
    COUNT_EXPERTS = 7  # a number as int32, which comes back with the counts over the socket
    WARM_UP = 8

    def message(self, body: bytes = b"") -> bytes:
        return bytes((self,)) + body
