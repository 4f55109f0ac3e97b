"""Follows a plain OpenAI server by asking: what it serves, and how busy it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo_router.endpoints.endpoint import UNKNOWN_LOAD
from octavo_router.errors import Unreachable
from octavo_router.http.fetch import Connection
from octavo_router.signals.interruptible_sleep import pause
from octavo_router.signals.plain_load import PlainLoad

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.http.deadlines import DeadlineTick
    from octavo_router.http.fetch import FetchResponse
    from octavo_router.metrics import SignalCounts
    from octavo_router.signals.interfaces import StateSink
    from octavo_router.signals.settings import SignalSettings

MODELS_PATH = "/v1/models"
METRICS_PATH = "/metrics"
MAX_PAGE_BYTES = 8 * 2**20


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None  # vLLM's: an adapter names its base model
    max_model_len: int | None = None
    vocab_size: int | None = None  # an Octavo engine's, polled as any other server


class _Models(msgspec.Struct):
    data: list[_Model] = []


class PlainFollower:
    """Polls over one kept connection. `follow` ends only by `Unreachable`."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: SignalSettings,
        *,
        counts: SignalCounts,
        set_state: StateSink,
        on_changed: Callable[[Endpoint], None],
        forget: Callable[[], None],
        now: Callable[[], float],
        rng: Random,
        deadlines: DeadlineTick,
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._counts = counts
        self._set_state = set_state
        self._on_changed = on_changed
        self._forget = forget
        self._now = now
        self._rng = rng
        self._deadlines = deadlines
        self._connection: Connection | None = None
        self._has_metrics = True
        self._started_at: float | None = None
        self._models_at: float | None = None
        self._models = msgspec.json.Decoder(_Models)

    async def follow(self) -> None:
        num_failed = 0
        self._endpoint.kind = "openai"
        self._has_metrics = True
        self._models_at = None
        try:
            while True:
                try:
                    await self._poll()
                except Unreachable as error:
                    num_failed += 1
                    self._drop_connection()
                    self._load_is_unknown()
                    self._counts.polls.add("refused" if error.is_refused else "failed")
                    if error.is_refused or num_failed >= self._settings.num_failed_polls:
                        raise
                else:
                    num_failed = 0
                    self._set_state(self._endpoint, "ready", "")
                await self._pause(self._settings.idle_polls if num_failed == 0 else 1)
        finally:
            self._drop_connection()

    async def _pause(self, longest: int) -> None:
        """Until it is worth asking again: soon, unless it has nothing to do and gets nothing.

        One that ends its connection may have died, idle or not.
        """
        endpoint, connection = self._endpoint, self._connection
        was_open = connection is not None and connection.is_open
        last_pick = endpoint.last_pick

        def has_work() -> bool:
            load = endpoint.load
            return bool(
                endpoint.num_requests
                or endpoint.last_pick != last_pick
                or load.running
                or load.waiting
                or (was_open and connection is not None and not connection.is_open)
            )

        def next_round_s() -> float:
            return self._settings.poll_s * (0.8 + 0.4 * self._rng.random())

        await pause(self._deadlines, rounds=longest, next_round_s=next_round_s, is_over=has_work)

    async def _poll(self) -> None:
        now = self._now()
        is_due = self._models_at is None or now - self._models_at >= self._settings.models_s
        if is_due or not self._has_metrics:
            self._take_models(await self._get(MODELS_PATH))
            self._models_at = now
        if self._has_metrics:
            self._take_metrics(await self._get(METRICS_PATH))

    async def _get(self, path: str) -> FetchResponse:
        """Raises `Unreachable` for whatever a server that can work would not say."""
        spec = self._endpoint.spec
        target = self._settings.target(spec)
        connection = self._connection
        if connection is None or not connection.is_open or connection.target != target:
            self._drop_connection()
            connection = await Connection.open(target, timeout_s=self._settings.connect_s)
            self._connection = connection
        response = await connection.get(
            spec.address.prefix + path,
            headers=self._settings.headers(spec),
            timeout_s=self._settings.answer_s,
            max_body_bytes=MAX_PAGE_BYTES,
        )
        if path == MODELS_PATH and response.status >= 500:
            raise Unreachable(f"{path} answers {response.status}")
        return response

    def _take_models(self, response: FetchResponse) -> None:
        endpoint = self._endpoint
        if response.status != 200:
            return  # it wants a key, or does not list: it may serve those who know it
        try:
            models = self._models.decode(response.body).data
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"{MODELS_PATH} is no list of models: {error}") from error
        names = endpoint.spec.names or tuple(model.id for model in models)
        adapters = frozenset(model.id for model in models if model.parent)
        lengths = [model.max_model_len for model in models if model.max_model_len]
        endpoint.max_model_len = max(lengths, default=0)
        endpoint.vocab_size = min((m.vocab_size for m in models if m.vocab_size), default=0)
        if (names, adapters) != (endpoint.names, endpoint.adapters):
            endpoint.names, endpoint.adapters = names, adapters
            endpoint.adapter_digests = {}  # it does not report them
            self._on_changed(endpoint)

    def _take_metrics(self, response: FetchResponse) -> None:
        if response.status in (404, 405, 501):
            self._has_metrics = False
            self._counts.polls.add("no_metrics")
            return
        page = PlainLoad(response.body if response.status == 200 else b"")
        if page.load is None:
            # It answers, so it lives; how busy it is we know from our own requests there.
            self._load_is_unknown()
            self._counts.polls.add("unreadable")
            return
        if page.started_at is not None:
            if self._started_at is not None and page.started_at > self._started_at:
                self._forget()
            self._started_at = page.started_at
        self._endpoint.load = page.load
        self._endpoint.load_at = self._now()
        self._counts.polls.add("ok")

    def _load_is_unknown(self) -> None:
        self._endpoint.load = UNKNOWN_LOAD
        self._endpoint.load_at = None

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
