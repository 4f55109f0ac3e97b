"""Requests that must not run twice: what became of each key that a client gave its request.

    nothing ──begin──► running ──keep──► kept ──► forgotten, by age or room
                          └──forget──► nothing          it failed or was left: it may be tried again

A key belongs to its tenant and path, and to one body. Pure but for the clock; bounded by count,
bytes and age. Belongs to the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from octavo_router.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.config.settings import FlowConfig

MAX_ANSWER_BYTES: Final = 2**20
MAX_KEYS: Final = 65_536
_RETRY_S: Final = 1.0  # for who asks again while the first one is under way


Name: TypeAlias = tuple[str, str, str]  # tenant, path, key


class StoredResponse(NamedTuple):
    """An answer that can be given again."""

    status: int
    content_type: str
    body: bytes
    model: str


@dataclass(slots=True)
class Run:
    """One request with a key."""

    name: Name
    digest: bytes  # of its body
    ended_at: float = 0.0  # monotonic, once it has ended
    answer: StoredResponse | None = None  # None at its end: larger than is kept, or out of room


class IdempotencyKeys:
    """`find` before anything is done for a request, `begin` when it is let in."""

    def __init__(self, config: FlowConfig, clock: Callable[[], float]) -> None:
        self.config = config  # may be replaced at any time
        self._clock = clock
        self._running: dict[Name, Run] = {}
        self._ended: dict[Name, Run] = {}  # in the order of their ends
        self._answered: dict[Name, Run] = {}  # those of them whose answers are kept
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def num_bytes(self) -> int:
        """Of kept answers."""
        return self._num_bytes

    def find(self, tenant: str, path: str, key: str, body: bytes) -> StoredResponse | None:
        """The answer that its first run got; None: there was none. Raises Rejected 409, 422."""
        self._age()
        name = (tenant, path, key)
        run = self._running.get(name) or self._ended.get(name)
        if run is None:
            return None
        if run.digest != _digest(body):
            raise Rejected(
                422, "idempotency_key_reused",
                "This idempotency-key was used for a request with another body; use a new one.",
            )  # fmt: skip
        if name in self._running:
            raise Rejected(
                409, "idempotency_in_progress",
                "The request with this idempotency-key is still being answered.",
                retry_after_s=_RETRY_S,
            )  # fmt: skip
        if run.answer is None:
            raise Rejected(
                409, "idempotency_answer_gone",
                "The request with this idempotency-key was answered, but the answer is not kept; "
                "use a new key to run it again.",
            )  # fmt: skip
        return run.answer

    def begin(self, tenant: str, path: str, key: str, body: bytes) -> Run:
        """It is under way from now on. `keep` or `forget` must follow."""
        run = Run((tenant, path, key), _digest(body))
        assert run.name not in self._running and run.name not in self._ended, "find was not called"
        self._running[run.name] = run
        return run

    def keep(self, run: Run, answer: StoredResponse | None) -> None:
        """It has been answered. None: the answer cannot be given again."""
        if self._running.pop(run.name, None) is None:
            return
        run.ended_at = self._clock()
        self._ended[run.name] = run
        if answer is not None and len(answer.body) <= MAX_ANSWER_BYTES:
            run.answer = answer
            self._answered[run.name] = run
            self._num_bytes += len(answer.body)
        # Answers go first, oldest first: what is left still says that they were given.
        while self._num_bytes > self.config.idempotency_bytes:
            self._drop_answer(next(iter(self._answered.values())))
        while len(self._ended) > MAX_KEYS:
            self._drop(next(iter(self._ended.values())))

    def forget(self, run: Run) -> None:
        """It came to nothing that could be given again. Harmless after its end."""
        self._running.pop(run.name, None)

    def _age(self) -> None:
        oldest = self._clock() - self.config.idempotency_s
        while self._ended:
            run = next(iter(self._ended.values()))
            if run.ended_at > oldest:
                return
            self._drop(run)

    def _drop(self, run: Run) -> None:
        del self._ended[run.name]
        self._drop_answer(run)

    def _drop_answer(self, run: Run) -> None:
        if run.answer is not None:
            del self._answered[run.name]
            self._num_bytes -= len(run.answer.body)
            run.answer = None


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()
