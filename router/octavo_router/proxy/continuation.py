"""A stream that its client lost with a router, and continues at another one.

With `x-octavo-continue: 0` a client's stream keeps the lines ": octavo ..." of
`octavo_engine.protocol.resume`, which SSE clients ignore. Where it breaks, the client sends what it
has of the stream, up to its last whole event, and the request behind that, byte for byte, with the
first part's length: `x-octavo-continue: 5120`. The stream then goes on as one does whose engine was
lost. No router remembers anything, so any of them can do it.

What a client sends is as little to be trusted as a prompt: it may say which tokens an answer begins
with, but not from which address an engine fetches their blocks. Answers that engines store under
their ids (/v1/responses) are not continued so.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.endpoints import CONTINUE_HEADER
from octavo_router.errors import Rejected
from octavo_router.proxy.stream_form import CHUNKS

if TYPE_CHECKING:
    from octavo_router.proxy.head_facts import HeadFacts
    from octavo_router.proxy.resume import StreamMemory

_BEGIN: Final = re.compile(rb"^: octavo begin ", re.MULTILINE)
_COMMENT: Final = re.compile(rb"^:(?! octavo )[^\n]*\n\n", re.MULTILINE)  # signs of life
_ERROR: Final = re.compile(rb'^data: \{"error":', re.MULTILINE)


def cut(body: bytes, facts: HeadFacts) -> tuple[bytes, bytes]:
    """What the client has of the stream, and its request. Raises Rejected."""
    length = facts.continues
    assert length is not None
    if facts.idempotency_key:
        raise _refused(f"{CONTINUE_HEADER} cannot be combined with idempotency-key")
    if facts.path is None or facts.path.resumes is not CHUNKS:
        raise _refused(f"{CONTINUE_HEADER} is for chat completions and completions only")
    if length > len(body):
        raise _refused(f"{CONTINUE_HEADER} is {length}, but the body has {len(body)} bytes")
    return body[:length], body[length:]


def remember(memory: StreamMemory, seen: bytes, *, is_stream: bool) -> None:
    """The memory of a router that had relayed it. Raises Rejected."""
    if not is_stream:
        raise _refused(f"{CONTINUE_HEADER} requires stream: true")
    error = _ERROR.search(seen)  # with which a router ended it, and all behind it
    seen = _COMMENT.sub(b"", seen[: error.start()] if error else seen)
    starts = [match.start() for match in _BEGIN.finditer(seen)]
    if seen[: starts[0] if starts else None].strip():
        raise _refused(f"what {CONTINUE_HEADER} counts does not begin with ': octavo begin'")
    for start, end in pairwise([*starts, len(seen)]):
        memory.start_over()
        memory.feed(seen[start:end])
        if memory.lost_with:
            raise _refused(f"the stream so far cannot be read: {memory.problem}")
    memory.start_over()
    memory.forget_address()
    if memory.is_over or memory.missing:
        raise Rejected(
            400, "nothing_to_continue", "The response is complete: no more tokens follow.",
            param=CONTINUE_HEADER,
        )  # fmt: skip


def _refused(message: str) -> Rejected:
    return Rejected(400, "invalid_header", f"{message}.", param=CONTINUE_HEADER)
