"""Tries grammars out where they can do no harm: `python -m octavo_engine.grammar.trial_process`.

A process with little memory and little time, which a grammar may take down. Over its socket come
grammars, each answered with what is wrong with it, if anything; and answers with the schema that
they must be valid under, whose patterns are as foreign as a grammar. Each grammar is compiled for
an alphabet of bytes: what bursts, bursts there, before the engine's core compiles the same for its
model's vocabulary.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from typing import Final

import msgspec
from llguidance import LLMatcher, LLTokenizer

from octavo_engine.errors import InvalidRequest, is_failure
from octavo_engine.grammar.check import check, compiler_source
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.process_memory import address_space_bytes
from octavo_engine.grammar.validation import verdict
from octavo_engine.state.grammar import GrammarSpec  # noqa: TC001  (a field of a message)

GROWTH_BYTES: Final = 128 << 20  # of address space, for one grammar
KEPT_BYTES: Final = 64 << 20  # that may stay behind, before another process takes over
CPU_S: Final = 2  # for one grammar; to a second more, for the limit is of whole seconds
LENGTH_BYTES: Final = 4  # before each message
_TRY_OUT_BYTES: Final = 32
_NICENESS: Final = 10


class TrialRequest(msgspec.Struct, omit_defaults=True):
    """A grammar; or answers and the JSON of their schema."""

    spec: GrammarSpec | None = None
    texts: tuple[str, ...] = ()
    schema: str = ""


class TrialReply(msgspec.Struct, omit_defaults=True):
    """What is wrong with the grammar, in a message; or what is known of each answer."""

    message: str = ""
    param: str | None = None
    code: str | None = None
    verdicts: tuple[bool | None, ...] = ()
    is_last: bool = False  # the process ends now: too much of its memory stayed behind


class Trial:
    """Answers requests; whatever takes too long or too much ends the process."""

    def __init__(self) -> None:
        self._alphabet = LLTokenizer("byte")

    def answer(self, request: TrialRequest) -> TrialReply:
        if request.spec is None:
            schema = msgspec.json.decode(request.schema)
            return TrialReply(verdicts=tuple(verdict(text, schema) for text in request.texts))
        try:
            check(request.spec)
            self._compile(request.spec)
        except InvalidRequest as error:
            return TrialReply(error.message, error.param, error.code)
        return TrialReply()

    def _compile(self, spec: GrammarSpec) -> None:
        """Only that it ends counts. Whether a text satisfies it, the core says, which has the
        tokens that a grammar may name."""
        try:
            source = compiler_source(spec, {}, DEFAULT_LIMITS)
            limits = DEFAULT_LIMITS.parser_limits()
            matcher = LLMatcher(self._alphabet, source, limits=limits, log_level=0)
            for _ in range(_TRY_OUT_BYTES):
                if matcher.is_error() or matcher.is_stopped():
                    break
                mask = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << 256) - 1)
                if not mask:
                    break
                matcher.consume_token((mask & -mask).bit_length() - 1)
        except BaseException as error:
            if not is_failure(error):
                raise


def serve(connection: socket.socket) -> None:
    """Until the other end is closed, or too much memory stayed behind."""
    trial = Trial()
    start_bytes = address_space_bytes()
    _limit(start_bytes + GROWTH_BYTES)
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(TrialRequest).decode
    _send(connection, b"")  # ready
    while (message := receive(connection)) is not None:
        _grant_time()
        reply = trial.answer(decode(message))
        reply.is_last = address_space_bytes() > start_bytes + KEPT_BYTES
        _send(connection, encode(reply))
        if reply.is_last:
            return


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None where the other end is closed. Raises TimeoutError."""
    head = _receive(connection, LENGTH_BYTES)
    return None if head is None else _receive(connection, int.from_bytes(head, "little"))


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(framed(message))


def _limit(num_bytes: int) -> None:
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if num_bytes > GROWTH_BYTES:  # only where it is known how much there was
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    with suppress(OSError):
        os.nice(_NICENESS)


def _grant_time() -> None:
    """For one more request; SIGXCPU ends the process then."""
    seconds = math.ceil(time.process_time()) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def main(arguments: list[str] | None = None) -> None:
    # They reach the whole group, while the server still answers what it has: the connection's end
    # is the end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    connection = socket.socket(fileno=parser.parse_args(arguments).fd)
    with connection, suppress(ConnectionError):
        serve(connection)


if __name__ == "__main__":
    main()
