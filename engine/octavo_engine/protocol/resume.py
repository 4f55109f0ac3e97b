"""How a router continues a generation on another engine, and learns what to continue with.

With STREAM_HEADER: tokens, the engine puts one SSE comment line before each event:

    : octavo begin {"id": "chatcmpl-..", "created": 1, "seed": 7}      once, before the first event
    : octavo 0 17,204,9                                                choice, its new token ids
    data: {...}                                                        the event those tokens made

An event without new tokens has no line. The line belongs to the event that follows it. A reader
that removes all lines beginning with ": octavo " has the stream that a client would have got.

To resume, the router sends the original body again behind what it knows, with RESUME_HEADER: 1 and
the original path and headers:

    body = u32 little-endian length, then JSON {"id", "created", "seed", "tokens": [[..], [..]]}
           of that length, then the original body, byte for byte

`tokens` holds one list for each answer (prompt-major: prompt x n). The engine computes prompt and
tokens like a prompt, replays them through detokenisation, stop conditions, grammar and penalties,
and streams only what comes after: the joined stream equals the unbroken one. An answer that had
already ended yields its final event again only if the router did not see it (`finished` lists the
indices that it saw).
"""

from __future__ import annotations

from dataclasses import dataclass, field

LINE_PREFIX = b": octavo "
BEGIN = b": octavo begin "


@dataclass(frozen=True, slots=True)
class Resume:
    """What is known of a broken generation."""

    id: str
    created: int
    seed: int
    tokens: list[list[int]]
    finished: list[int] = field(default_factory=list)
