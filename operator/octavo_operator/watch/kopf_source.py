"""kopf as a source of events: it watches and reconnects; each handler hands one event on.

Only on.event, on.login: no finalizers, no annotations, no timers, no peering, no events of kopf's.
It runs in a thread with a loop of its own: when it ends, it cancels every task it finds beside it,
and a burst of ten thousand events leaves our loop free for probes and the Lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import threading
from typing import TYPE_CHECKING, Any, cast

import kopf

from octavo_engine.protocol.kubernetes import DEPLOYMENT_LABEL
from octavo_operator.cluster.connections import HttpSession, HttpSessions
from octavo_operator.objects import kinds
from octavo_operator.watch.world import WATCHED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from octavo_common.loop_watch import LoopWatch
    from octavo_operator.cluster.kube_config import KubeConfig
    from octavo_operator.objects.kinds import Kind
    from octavo_operator.watch.informer import Informer

    OnEvent = Callable[[Kind, str | None, Any], None]

logger = logging.getLogger("octavo.operator.watch")

STOP_S = 0.7
LOOK_S, END_S = 1.0, 3.0
MAX_ROUNDS, ROUND_S = 10, 0.1
# Between tries while the API server is away; never so long that its return goes unnoticed. When
# they have run out, kopf ends, and is begun anew.
BACKOFFS_S = (0.2, 0.5, 1.0, *(2.0,) * 60)
TOKEN_LIFE = datetime.timedelta(minutes=10)


async def watch(
    config: KubeConfig,
    intake: Informer,
    *,
    namespaces: Sequence[str],
    loop_watch: LoopWatch,
) -> None:
    """Watch until cancelled. Raises whatever ends kopf, such as a CRD that was deleted."""
    loop = asyncio.get_running_loop()
    stop = _Stop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_event(kind: Kind, event_type: str | None, body: Any) -> None:
        with contextlib.suppress(RuntimeError):  # our loop has ended meanwhile
            loop.call_soon_threadsafe(intake.event, kind, event_type, body)

    def run() -> None:
        error: Exception | None = None
        try:
            asyncio.run(_operate(config, on_event, namespaces, stop, loop_watch))
        except asyncio.CancelledError:
            logger.debug("The watches were stopped")
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_finish, ended, error)

    thread = threading.Thread(target=run, name="kopf", daemon=True)
    thread.start()
    try:
        await asyncio.shield(ended)
    finally:
        stop.set()
        # It only watches: where it does not end by itself, the process may end without it.
        await asyncio.wait([ended], timeout=STOP_S)


class WatchesStuck(Exception):
    """kopf neither watches nor ends."""


class _Stop:
    """Cancels a task of another thread's loop, be it not begun, running or done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None
        self.is_set = False

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            if self._cancel is not None:
                self._cancel()

    @contextlib.contextmanager
    def around(self, task: asyncio.Task[Any]) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        with self._lock:
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            if self.is_set:
                task.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None


async def _operate(
    config: KubeConfig,
    on_event: OnEvent,
    namespaces: Sequence[str],
    stop: _Stop,
    loop_watch: LoopWatch,
) -> None:
    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not stop.is_set:  # generators of kopf's that are closed in the middle complain
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(on_exception)
    async with loop_watch, HttpSessions() as sessions:  # which kopf leaves open
        # NOTE: kopf's own stop flag lets streams hang for five seconds; a cancellation does not.
        operator = asyncio.create_task(
            kopf.operator(
                registry=make_registry(config, on_event, sessions),
                settings=make_settings(),
                identity=cast(
                    "Any", "octavo"
                ),  # else kopf looks up the user's name: pods have none
                standalone=True,
                clusterwide=not namespaces,
                namespaces=tuple(namespaces),
            )
        )
        ending = asyncio.create_task(_until_ending())
        try:
            with stop.around(operator):
                await asyncio.wait((operator, ending), return_when=asyncio.FIRST_COMPLETED)
                if ending.done() and not operator.done():
                    await asyncio.wait([operator], timeout=END_S)
                if not operator.done():
                    raise WatchesStuck("one of kopf's watches failed, and the others do not end")
                await operator
        finally:
            await _end_tasks()


async def _until_ending() -> None:
    """Returns when kopf has begun to end. NOTE: a watch that fails closes the connections of all,
    and the others may wait for ever for a login that never comes."""
    while True:
        await asyncio.sleep(LOOK_S)
        watchers = [t for t in asyncio.all_tasks() if t.get_name().startswith("watcher for ")]
        if any(task.cancelling() for task in watchers):
            return


async def _end_tasks() -> None:
    """Those that kopf leaves behind, and those that they begin as they end: while a task is left it
    may open a connection, so the sessions are closed after the last."""
    for _ in range(MAX_ROUNDS):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=ROUND_S)


def _finish(ended: asyncio.Future[None], error: Exception | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


def make_registry(
    config: KubeConfig, on_event: OnEvent, sessions: HttpSessions
) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login(config, sessions))
    for kind in WATCHED:
        kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)(
            _handler(kind, on_event)
        )
    return registry


def make_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # Which kinds exist is looked up once; no right to watch CRDs and namespaces is needed.
    settings.scanning.disabled = True
    settings.networking.error_backoffs = BACKOFFS_S
    settings.queueing.idle_timeout = 1.0  # a task per object lives only as long as its events
    settings.watching.chunk_size = 250
    for kind in WATCHED:
        if kind not in (kinds.LLM_DEPLOYMENT, kinds.LLM_ADAPTER):
            where = (kind.group, kind.version, kind.plural)
            settings.watching.label_selectors[where] = DEPLOYMENT_LABEL
    return settings


def _handler(kind: Kind, on_event: OnEvent) -> Any:
    async def handle(event: Any, **_: object) -> None:
        on_event(kind, event["type"], dict(event["object"]))

    return handle


def _login(config: KubeConfig, sessions: HttpSessions) -> Any:
    async def login(**_: object) -> kopf.AiohttpSession:
        # Requested at the start, when it is old, and when it was refused.
        token = await asyncio.to_thread(config.read_token, renew=True)
        session = HttpSession(
            tls=config.ssl_context(),
            limit=0,
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        await sessions.keep(session)
        expires = datetime.datetime.now(datetime.UTC) + TOKEN_LIFE
        return kopf.AiohttpSession(
            server=config.server,
            aiohttp_session=session.http,
            default_namespace=config.namespace,
            expiration=expires if config.has_passing_token else None,
        )

    return login
