"""The frame before a resumed request's body: reads and checks what a router knows of it."""

from __future__ import annotations

import re

from octavo_engine.config import split_address
from octavo_engine.errors import InvalidRequest, RequestError
from octavo_engine.protocol.endpoints import RESUME_HEADER
from octavo_engine.protocol.resume import Resume, unpack
from octavo_engine.server.http import strict_json
from octavo_engine.state.sampling_params import MAX_SEED

_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,160}")
_MAX_DEPTH = 8
_MAX_TOKEN_ID = 2**31 - 1


def read_frame(data: bytes) -> tuple[Resume, bytes]:
    """What is known, and the original body. Raises RequestError (400)."""
    try:
        header, body = unpack(data)
    except ValueError as error:
        raise bad_frame(str(error)) from None
    try:
        resume = strict_json.decode(header, Resume, max_depth=_MAX_DEPTH)
    except RequestError as error:
        raise bad_frame(error.message) from None
    _check(resume)
    return resume, body


def _check(resume: Resume) -> None:
    if not _ID.fullmatch(resume.id):
        raise bad_frame("id is not one that an engine gives")
    if not 0 <= resume.created < 2**53:
        raise bad_frame("created is not a time in seconds")
    if not -MAX_SEED - 1 <= resume.seed <= MAX_SEED:
        raise bad_frame("seed does not fit 64 bits")
    for ids in resume.tokens:
        if ids and not (min(ids) >= 0 and max(ids) <= _MAX_TOKEN_ID):
            raise bad_frame("tokens are not all token ids")
    if resume.pieces and (
        len(resume.tokens) != 1
        or min(resume.pieces) < 1
        or sum(resume.pieces) != len(resume.tokens[0])
        or resume.finished
    ):
        raise bad_frame("pieces are not those of the tokens of one answer that goes on")
    if not 0 <= resume.events < 2**31:
        raise bad_frame("events is not a number of events")
    if resume.kv_address:
        try:
            split_address(resume.kv_address)
        except ValueError:
            raise bad_frame("kv_address is not HOST:PORT") from None
    for name in ("finished", "opened"):
        indices: list[int] = getattr(resume, name)
        if len(set(indices)) != len(indices):
            raise bad_frame(f"{name} names an answer twice")
        for index in indices:
            if not 0 <= index < len(resume.tokens):
                raise bad_frame(f"{name} names answer {index}, but there are {len(resume.tokens)}")


def bad_frame(problem: str) -> InvalidRequest:
    return InvalidRequest(f"{RESUME_HEADER}: {problem}", param=RESUME_HEADER)
