"""How a router continues a generation on another engine, and learns what to continue with.

With STREAM_HEADER: tokens, the engine puts SSE comment lines in front of its events:

    : octavo begin {"id": "chatcmpl-..", "created": 1, "seed": 7, "answers": 1,
                    "prompt_tokens": 40, "cached": 32}           on one line
                    "kv_address": "10.0.0.7:14579" too, where the engine serves its KV blocks
    : octavo 0                                    answer 0 opens: an event of it without new tokens
    data: {...}

    : octavo 0 17,204,9                           answer, its new token ids
    data: {...}                                   the event those tokens made

The begin line stands once, at the head of the first event. `prompt_tokens` are those of all
prompts; `cached` is how many of what the engine was sent it found in its cache (a resumed stream's
tokens are sent too), as far as its prompts have begun. Both are for accounts: a router that knows
what it predicted learns what came of it, also where the client did not ask for usage.

Every event of an answer has one line, which may name no ids; the last usage chunk, errors and
[DONE] have none. A line belongs to the event that it heads: who did not see that event to its end
did not see the line. Tokens that made no event, because their text is held back, are sent with the
answer's next event, so that the text of all events so far is always exactly what the tokens sent so
far yield. A reader that removes all lines beginning with ": octavo " has the stream that a client
would have got.

Streams whose answer is a list of items (/v1/responses, /v1/messages) have such lines too, for the
one answer that they give: one on each event but the last and errors.

To resume, the router sends the original body again behind what it knows, with RESUME_HEADER: 1 and
the original path and headers:

    body = u32 little-endian length, then JSON {"id", "created", "seed", "tokens": [[..], [..]],
           "finished": [..], "opened": [..], "pieces": [..], "events": 7, "kv_address": ".."} of
           that length, then the original body, byte for byte

`tokens` holds one list for each answer (prompt-major: prompt x n). The engine computes prompt and
tokens like a prompt, replays them through detokenisation, stop conditions, grammar and penalties,
and streams only what comes after: the joined stream equals the unbroken one. An answer that had
already ended yields its final event again only if the router did not see it (`finished` lists the
indices that it saw); what an answer says once, at its beginning, is said again only if no event of
the answer was seen (`opened` lists the others; those with tokens and those finished need not be in
it). Usage counts the tokens of both parts.

An event of a list of items depends on those before it: they are numbered, and items that are done
say again what was in them. So for these paths the engine makes all events again and leaves out as
many as the client has seen, `events`. Events say what came at once: `pieces` has the number of
tokens of each line, in order, and they are read in the same pieces again. Both stay empty on other
paths.

`kv_address` is that of the engine's begin line: blocks of prompt and tokens may still be there. An
engine that gets blocks from others looks there before it computes them; others ignore it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field

LINE_PREFIX = b": octavo "
BEGIN = b": octavo begin "
MAX_RESUME_BYTES = 8 * 2**20  # of the JSON; a million tokens take seven

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Resume:
    """What is known of a broken generation."""

    id: str
    created: int
    seed: int
    tokens: list[list[int]]
    finished: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    events: int = 0
    kv_address: str = ""  # HOST:PORT where its engine serves its KV blocks


def begin_line(
    *,
    id: str,
    created: int,
    seed: int,
    answers: int,
    prompt_tokens: int,
    cached: int,
    kv_address: str = "",
) -> bytes:
    sent: dict[str, object] = {
        "id": id,
        "created": created,
        "seed": seed,
        "answers": answers,
        "prompt_tokens": prompt_tokens,
        "cached": cached,
    }
    if kv_address:
        sent["kv_address"] = kv_address
    return BEGIN + json.dumps(sent).encode() + b"\n"


def token_line(answer: int, token_ids: list[int]) -> bytes:
    """The line at the head of an event of this answer. Hot path."""
    if not token_ids:
        return b": octavo %d\n" % answer
    return b": octavo %d %s\n" % (answer, ",".join(map(str, token_ids)).encode())


def pack(resume: Resume, body: bytes) -> bytes:
    """The body that resumes: the frame, then the original one."""
    fields = asdict(resume)
    if not resume.events:  # engines of earlier versions know chunks only
        del fields["pieces"], fields["events"]
    if not resume.kv_address:
        del fields["kv_address"]
    packed = json.dumps(fields, separators=(",", ":")).encode()
    return _LENGTH.pack(len(packed)) + packed + body


def unpack(data: bytes) -> tuple[bytes, bytes]:
    """The frame's JSON, unread, and the original body. Raises ValueError."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"the frame's length is missing; the body has {len(data)} bytes")
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_RESUME_BYTES:
        raise ValueError(f"a frame of {length} bytes is above the limit of {MAX_RESUME_BYTES}")
    end = _LENGTH.size + length
    if end > len(data):
        raise ValueError(f"the frame has {length} bytes, but only {len(data) - _LENGTH.size} came")
    return data[_LENGTH.size : end], data[end:]
