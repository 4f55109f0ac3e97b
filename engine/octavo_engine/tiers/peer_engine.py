"""Another engine as a place where KV blocks are: looked up and read by a thread of its own.

Whatever goes wrong there yields fewer blocks, never other ones: a page counts when its checksum is
right and its name was sent. An engine that failed is left alone for a while.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo_engine.config import join_address
from octavo_engine.protocol.prefix_hash import TOKEN_BYTES
from octavo_engine.shared_secret import new_nonce, proof, proves
from octavo_engine.tiers.page import NAME_BYTES, is_tail
from octavo_engine.tiers.peer_wire import (
    CLIENT,
    MAX_NAMES,
    SERVER,
    VERSION,
    FrameKind,
    PeerChallenge,
    PeerChannel,
    PeerError,
    PeerHello,
    PeerProof,
    PeerRefused,
    pack_wanted,
    parse_found,
    parse_message,
)
from octavo_engine.tiers.price import TierMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo_engine.state.sequence import Sequence as OneSequence
    from octavo_engine.tiers.page import BlockName, Page, PageSizes
    from octavo_engine.tiers.peer_wire import Frame

logger = logging.getLogger(__name__)

CONNECT_S = 2.0
RETRY_S = 1.0  # after a failure; doubled with each further one
MAX_RETRY_S = 30.0
REFUSED_RETRY_S = 60.0  # it may be restarted with other settings
SILENCE_S = 5.0  # of an engine that computes a prompt; it gives a sign every second
FOLLOW_S = 600.0  # in which a followed prompt's turn must come
# What is assumed before anything was read: low, so that no more than a little time can be lost.
LATENCY_S, BYTES_PER_S = 5e-3, 2e8


class PeerAddress(NamedTuple):
    """Where another engine serves blocks."""

    host: str
    port: int

    def __str__(self) -> str:
        return join_address(self.host, self.port)


class _Unwanted(Exception):
    """What is being read is of no use any more."""


class _Fetch:
    """Pages that somebody waits for."""

    def __init__(
        self,
        names: Sequence[BlockName],
        deadline: float,
        take: Callable[[BlockName, Page], None],
        begun: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        self.names, self.deadline, self.take, self.begun = names, deadline, take, begun
        self._done = done
        self.is_done = False

    def end(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._done()


class _Job(NamedTuple):
    work: Callable[[PeerChannel], None]
    deadline: float
    done: Callable[[], None]


class PeerEngine:
    """`lookup` and `fetch` never wait; callbacks are called on its thread, `done` always once."""

    def __init__(
        self,
        address: PeerAddress,
        *,
        identity: Mapping[str, str],
        sizes: PageSizes,
        secret: bytes = b"",
    ) -> None:
        self.address = address
        self.meter = TierMeter(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
        self.num_failures = 0
        self._identity, self._sizes, self._secret = dict(identity), sizes, secret
        self._retry_s = RETRY_S
        self._up_at = 0.0
        self._is_closed = False
        self._is_busy = False
        self._connection: socket.socket | None = None
        self._channel: PeerChannel | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._fetches: SimpleQueue[_Fetch] = SimpleQueue()
        self._reading: list[_Fetch] = []  # taken from there, by its thread
        self._thread: threading.Thread | None = None

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self._up_at

    def lookup(
        self,
        names: Sequence[BlockName],
        timeout_s: float,
        done: Callable[[set[BlockName]], None],
        *,
        sequence: OneSequence | None = None,
    ) -> None:
        """Which of them it has, as far as it says in time. It goes by names only, not by whose
        they are."""
        found: set[BlockName] = set()

        def work(channel: PeerChannel) -> None:
            for at in range(0, len(names), MAX_NAMES):
                part = names[at : at + MAX_NAMES]
                channel.send(FrameKind.LOOKUP, b"".join(part))
                found.update(parse_found(channel.receive(FrameKind.FOUND).payload, part))

        self._submit(work, timeout_s, lambda: done(found))

    def fetch(
        self,
        names: Sequence[BlockName],
        timeout_s: float,
        take: Callable[[BlockName, Page], None],
        done: Callable[[], None],
        *,
        begun: Callable[[], None] = lambda: None,
        sequence: OneSequence | None = None,
    ) -> None:
        """Read pages, after what was submitted before; `take` gets each as it arrives, that of a
        tail by the name of as many tokens as came. All that wait by then are one request."""
        one = _Fetch(names, time.monotonic() + timeout_s, take, begun, done)
        self._fetches.put(one)
        self._submit(self._read_fetches, timeout_s, one.end)

    def follow(
        self,
        names: Sequence[BlockName],
        take: Callable[[BlockName, Page], None],
        done: Callable[[], None],
        *,
        is_wanted: Callable[[], bool],
    ) -> None:
        """Read pages of a prompt that is being computed there, each soon after it is. Nothing else
        is read meanwhile, so one that follows should do nothing else."""

        def work(channel: PeerChannel) -> None:
            if not is_wanted():
                return
            channel.deadline = time.monotonic() + SILENCE_S
            channel.send(FrameKind.FOLLOW, b"".join(names))
            left = set(range(len(names)))
            while True:
                channel.deadline = time.monotonic() + SILENCE_S
                frame = channel.receive(FrameKind.PAGE, FrameKind.WAIT, FrameKind.END)
                if frame.kind is FrameKind.END:
                    return
                if frame.kind is FrameKind.PAGE:
                    if frame.place not in left:
                        raise PeerError("it sent a block out of turn")
                    left.discard(frame.place)
                    take(names[frame.place], self._page_of(names[frame.place], frame))
                if not is_wanted():
                    raise _Unwanted

        self._submit(work, FOLLOW_S, done)

    @property
    def num_jobs(self) -> int:
        """About how many are under way or wait."""
        return self._jobs.qsize() + self._is_busy

    def close(self, *, waits: bool = True) -> None:
        """With `waits` false its thread may end a little later."""
        self._is_closed = True
        self._jobs.put(None)
        connection = self._connection
        if connection is not None:
            with suppress(OSError):  # it may not be connected any more
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and waits:
            self._thread.join(timeout=2.0)

    def _submit(
        self, work: Callable[[PeerChannel], None], timeout_s: float, done: Callable[[], None]
    ) -> None:
        if self._is_closed:
            done()
            return
        if self._thread is None:
            name = f"kv-peer-{self.address}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._jobs.put(_Job(work, time.monotonic() + timeout_s, done))

    # -- its thread --------------------------------------------------------------------------------

    def _read_fetches(self, channel: PeerChannel) -> None:
        """Each ends once its last page is there, or a page of one behind it."""
        with suppress(Empty):
            while True:
                self._reading.append(self._fetches.get_nowait())
        self._reading = [one for one in self._reading if not one.is_done]
        left = deque(self._reading)
        if not left:
            return
        channel.deadline = max(one.deadline for one in left)
        wanted = [(name, one) for one in left for name in one.names]
        left[0].begun()

        def end_before(one: _Fetch | None) -> None:
            while left and left[0] is not one:
                left.popleft().end()
                if left:
                    left[0].begun()

        for at in range(0, len(wanted), MAX_NAMES):
            part = wanted[at : at + MAX_NAMES]
            channel.send(FrameKind.GET, pack_wanted([name for name, _ in part]))
            last = -1
            while (frame := channel.receive(FrameKind.PAGE, FrameKind.END)).kind is FrameKind.PAGE:
                if not last < frame.place < len(part):
                    raise PeerError("it sent a block out of turn")
                last = frame.place
                name, one = part[last]
                end_before(one)
                one.take(_arrived(name, frame.num_tokens), self._page_of(name, frame))
                if name is one.names[-1]:
                    end_before(left[1] if len(left) > 1 else None)
        end_before(None)

    def _page_of(self, name: BlockName, frame: Frame) -> Page:
        """Raises PeerError."""
        page = frame.page
        if page is None or page.nbytes != self._sizes.of(name):
            raise PeerError("it sent a page of another size than was named")
        return page

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._is_busy = True
            try:
                if not self._is_closed and not self.is_down:
                    self._do(job)
            except _Unwanted:
                self._disconnect()  # more of it is on its way
            except PeerError as error:
                self._fail(error)
            except Exception:
                logger.exception("Unhandled error while KV blocks were read from another engine")
                self._disconnect()
            finally:
                self._is_busy = False
                job.done()
        self._disconnect()

    def _do(self, job: _Job) -> None:
        if time.monotonic() >= job.deadline:
            return  # nobody waits for it any more
        was_connected = self._channel is not None
        try:
            job.work(self._ready(job.deadline))
        except PeerRefused:
            raise
        except PeerError:
            if not was_connected:
                raise
            self._disconnect()  # it may have been restarted since
            job.work(self._ready(job.deadline))
        self._retry_s = RETRY_S

    def _ready(self, deadline: float) -> PeerChannel:
        if self._channel is None:
            self._channel = self._connect(min(deadline, time.monotonic() + CONNECT_S))
        self._channel.deadline = deadline
        return self._channel

    def _connect(self, deadline: float) -> PeerChannel:
        """Raises PeerError."""
        left_s = max(0.001, deadline - time.monotonic())
        try:
            connection = socket.create_connection(self.address, timeout=left_s)
            self._connection = connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, UnicodeError) as error:
            raise PeerError(f"it cannot be reached: {error}") from None
        channel = PeerChannel(connection, sizes=self._sizes)
        channel.deadline = deadline
        nonce = new_nonce()
        channel.send(FrameKind.HELLO, msgspec.json.encode(PeerHello(VERSION, nonce)))
        theirs = parse_message(channel.receive(FrameKind.CHALLENGE).payload, PeerChallenge)
        if not proves(theirs.proof, self._secret, SERVER, nonce, theirs.nonce):
            raise PeerRefused("the secrets differ")
        own = proof(self._secret, CLIENT, nonce, theirs.nonce)
        channel.send(FrameKind.PROOF, msgspec.json.encode(PeerProof(own, self._identity)))
        channel.receive(FrameKind.WELCOME)
        return channel

    def _fail(self, error: PeerError) -> None:
        self._disconnect()
        self.num_failures += 1
        refused = isinstance(error, PeerRefused)
        wait_s = REFUSED_RETRY_S if refused else self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        self._up_at = time.monotonic() + wait_s
        if not self._is_closed:
            text = "No KV blocks from the engine at %s for %.0f s: %s"
            logger.warning(text, self.address, wait_s, error)

    def _disconnect(self) -> None:
        self._channel = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _arrived(name: BlockName, num_tokens: int) -> BlockName:
    """Of what was sent for it: a tail that is known in part has the name of that part. Raises
    PeerError."""
    if not is_tail(name):
        return name
    length = NAME_BYTES + TOKEN_BYTES * num_tokens
    if not NAME_BYTES < length <= len(name):
        raise PeerError("it sent a part of a block that was not named")
    return name[:length]
