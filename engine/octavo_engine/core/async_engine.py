"""The engine as asyncio sees it: a stream of outputs a request, over a core that may restart."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from octavo_engine.core.connect import choose_connect, connect_cores
from octavo_engine.core.info import CoreHealth, ModelInfo
from octavo_engine.core.kv_events.residency_feed import ResidencyFeed
from octavo_engine.core.load_meter import LoadMeter
from octavo_engine.core.media.prompt import PictureTokens
from octavo_engine.core.media.spec import read_media_spec
from octavo_engine.core.media.workers import PictureWorkers
from octavo_engine.core.model_files import load_model_tokenizer, localized, resolve
from octavo_engine.core.pooling.async_pooling import AsyncPooling, check_items, check_task
from octavo_engine.core.process import wire
from octavo_engine.core.seeds import Seeds
from octavo_engine.core.text.output_processor import OutputProcessor, SettledSubmission
from octavo_engine.core.text.output_stream import OutputReader
from octavo_engine.core.text.submission import Submission
from octavo_engine.core.validate import check_choices, settle_params, tokenized_bad_words
from octavo_engine.errors import (
    EngineDead,
    InvalidRequest,
    ModelError,
    OctavoError,
    QueueFull,
    machine_fault,
)
from octavo_engine.protocol.admission import retry_after_s
from octavo_engine.protocol.loading import FETCHING
from octavo_engine.state.adapter import AdapterRef
from octavo_engine.state.outputs import EngineStats, ProfileWritten
from octavo_engine.state.request import BACKGROUND
from octavo_engine.state.sampling_params import RequestOutputKind
from octavo_engine.tokenization.threads import hung_text, off_loop
from octavo_engine.tokenization.tokenizer import check_length, check_vocab, ends_of_text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.connect import Connect
    from octavo_engine.core.pooling.async_pooling import PoolingItem
    from octavo_engine.core.process.client import EngineClient
    from octavo_engine.core.text.output_processor import Processed, TrackedRequest
    from octavo_engine.core.text.output_stream import InlineSink, OutputSink
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.errors import RequestError
    from octavo_engine.state.adapter import AdapterLoaded
    from octavo_engine.state.outputs import StepOutput
    from octavo_engine.state.pooling import PoolingParams
    from octavo_engine.state.sampling_params import SamplingParams
    from octavo_engine.tokenization.tokenizer import Tokenizer
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)

_LOADING = "the model is still being loaded"
_CUT_SHORT = "the server shut down before this answer was done"


def _picture_workers(
    config: EngineConfig, files: ModelFiles, tokenizer: Tokenizer
) -> PictureWorkers | None:
    """None where it is not known how what this model takes is prepared: it answers text."""
    try:
        spec = read_media_spec(files, config.picture_overrides)
        if spec is None:
            return None
        tokens = PictureTokens(spec.media, tokenizer)
    except ModelError as error:
        logger.warning("Pictures and sounds are refused: %s", error)
        return None
    return PictureWorkers(spec, tokens, max_images=config.max_media_per_prompt(spec.media.kind))


class AsyncEngine:
    """Lives on the event loop it was started on. Requests may come once it is ready.

    The core runs in a child process, which is restarted when it dies or hangs; the simulator's runs
    in a thread. Requests in flight when a core is lost end with EngineDead.
    """

    def __init__(self, config: EngineConfig, connect: Connect) -> None:
        self.config = config
        self.stats = EngineStats()
        self.residency = ResidencyFeed(self._send)
        self._connect = connect
        self._client: EngineClient | None = None
        self._tokenizer: Tokenizer | None = None
        self._processor: OutputProcessor | None = None
        self._info: ModelInfo | None = None
        self.pictures: PictureWorkers | None = None  # of a model that sees
        self._start_error: OctavoError | None = None
        self._seeds = Seeds(config.seed)
        self._pooling = AsyncPooling(self._send)
        self._readers: dict[TrackedRequest, OutputReader] = {}
        self._touched: dict[TrackedRequest, None] = {}  # whose readers wake in a moment
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._profile: asyncio.Future[ProfileWritten] | None = None  # who waits for it
        self._loads: dict[str, asyncio.Future[AdapterLoaded]] = {}  # of adapters, by their ids
        self._download = LoadMeter(FETCHING)
        self._loading = asyncio.create_task(self._load(), name="octavo-load")

    @classmethod
    async def start(cls, config: EngineConfig, *, connect: Connect | None = None) -> Self:
        """Begin to load and return, so that the port can be opened; `ready` waits for the rest."""
        if connect is None:
            connect = choose_connect(config)
        return cls(config, connect)

    async def ready(self) -> ModelInfo:
        """Raises the ConfigError or ModelError that ended the start."""
        await asyncio.wait([self._loading])
        if self._start_error is not None:
            raise self._start_error
        if self._loading.cancelled():
            raise OctavoError("the engine was stopped while it loaded")
        return self.info

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise EngineDead(_LOADING, code="loading", retry_after_s=1)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineDead(_LOADING, code="loading", retry_after_s=1)
        return self._tokenizer

    @property
    def num_in_flight(self) -> int:
        """Requests that are being read."""
        return len(self._readers) + self._pooling.num_in_flight

    def health(self) -> CoreHealth:
        if self._start_error is not None:
            return CoreHealth("dead", str(self._start_error))
        if self._client is None:
            done = self._download.read()
            share = (done.share if done else None) or 0.0
            return CoreHealth("loading", "the model is being fetched", share, done)
        health = self._client.health()
        if health.state == "ready" and self._info is None:
            return CoreHealth(
                "loading", "the model is being loaded", health.progress, health.loading
            )
        if health.state == "ready" and self._draining:
            return CoreHealth("draining", "the server is shutting down")
        if health.state == "ready" and (hang := hung_text()):
            return CoreHealth("stalled", hang)
        return health

    async def deliver(self, submission: Submission, sink: OutputSink[RequestOutput]) -> None:
        """Run a request to its end; its outputs, each what is new, go to `sink`.

        A resumed request delivers what comes after its resumed output. A slow consumer loses
        nothing: unread output is joined into one. Cancelling aborts the request in the core. Raises
        a RequestError, which may come after outputs.
        """
        request, reader = await self._submit(submission, sink.inline)
        try:
            while True:
                output = await reader.next()
                await sink.put(output)
                if output.finished:
                    return
        finally:
            self._close(request)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `deliver`, for a caller that iterates, each output what `params.output_kind` says;
        with `stream` false only one, with everything. Closing the iterator aborts the request in
        the core."""
        submission = Submission(
            request_id=request_id,
            prompt=prompt,
            params=params,
            priority=priority,
            deadline_s=deadline_s,
            cache_salt=cache_salt,
            stream=stream,
        )
        async with aclosing(self.iterate(submission)) as outputs:
            async for output in outputs:
                yield output

    async def iterate(self, submission: Submission) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, of a submission."""
        request, reader = await self._submit(submission, None)
        is_cumulative = submission.params.output_kind is RequestOutputKind.CUMULATIVE
        try:
            so_far: RequestOutput | None = None
            while True:
                output = await reader.next()
                if is_cumulative:
                    if so_far is None:
                        so_far = output
                    else:
                        so_far.absorb(output)
                    output = so_far.copy()
                yield output
                if output.finished:
                    break
        finally:
            self._close(request)

    async def pool(
        self,
        items: Sequence[PoolingItem],
        params: PoolingParams,
        *,
        request_id: str,
        deadline_s: float | None = None,
    ) -> list[NDArray[np.float32]]:
        """One array an item: [columns], or [tokens, columns] of per-token tasks.

        Cancelling aborts what is not computed yet. Raises a RequestError.
        """
        self._check_open()
        check_items(items, params, self.info)
        return await self._pooling.pool(items, params, request_id=request_id, deadline_s=deadline_s)

    async def abort(self, request_id: str) -> bool:
        """End all requests of that id with what they have; false if there is none."""
        requests = [r for r in self._readers if r.submission.request_id == request_id]
        for request in requests:
            if not request.finished:
                self._send_abort(self._outputs.abort(request))
                self._wake([request])
        return bool(requests)

    async def reset_prefix_cache(self) -> None:
        if self._client is not None:
            self._client.send(wire.ResetPrefixCache())

    async def sleep(self, *, on: bool, level: int = 1) -> None:
        """Give memory back, or take it again: see `CoreEngine.sleep`. Only while nothing runs."""
        self._send(wire.SleepCommand(on, level))

    async def start_profile(self) -> None:
        """Record every step from now on; what was recorded and not written is forgotten."""
        self._check_open()
        self._send(wire.ProfileCommand(on=True))

    async def stop_profile(self, path: str) -> int:
        """Write what was recorded to `path`; how many events that is. Raises a RequestError."""
        self._check_open()
        if self._profile is None:
            self._profile = asyncio.get_running_loop().create_future()
            self._send(wire.ProfileCommand(on=False, path=path))
        written = await asyncio.shield(self._profile)
        if written.error is not None:
            raise InvalidRequest(written.error)
        return written.events

    async def load_adapter(self, name: str, path: str, *, is_pinned: bool = False) -> AdapterRef:
        """Read a LoRA adapter into the core's memory. Raises a RequestError."""
        self._check_open()
        load_id = f"adapter-{secrets.token_hex(8)}"
        loading = self._loads[load_id] = asyncio.get_running_loop().create_future()
        self._send(wire.LoadAdapter(load_id, path, is_pinned))
        try:
            loaded = await loading
        finally:
            self._loads.pop(load_id, None)
        return AdapterRef(name, path, loaded.digest)

    async def unload_adapter(self, digest: str) -> None:
        """Forget an adapter's content; what runs with it goes on."""
        self._send(wire.UnloadAdapter(digest))

    def settle_seed(self, seed: int | None) -> int:
        """The seed that a request will use, for one that must be known before it runs."""
        return self._seeds.settle(seed)

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and let those in flight end.

        What is left at the deadline fails with EngineDead: somebody may go on with it elsewhere.
        With `migration_s` that happens to the streams of routers at once, and their blocks are
        served for so long.
        """
        self._draining = True
        held_s = self._move_out()
        try:
            async with asyncio.timeout(timeout_s):
                held = asyncio.sleep(held_s)
                await asyncio.gather(self._idle.wait(), self._pooling.idle(), held)
        except TimeoutError:
            self._send_abort(self._outputs.sequence_ids)
            self.on_lost(EngineDead(_CUT_SHORT, code="server_shutdown", retry_after_s=1))
            return False
        return True

    def _move_out(self) -> float:
        """Leave streams to other engines. For how many seconds they may fetch the blocks."""
        transfer = self.config.own_kv_transfer
        if transfer is None or not transfer.migration_s or self._processor is None:
            return 0.0
        error = EngineDead(_CUT_SHORT, code="server_shutdown", retry_after_s=1)
        moved, sequence_ids = self._processor.move_out(error)
        self._send_abort(sequence_ids)
        self._wake(moved)
        return transfer.migration_s if moved else 0.0

    async def stop(self) -> None:
        """End the core. Requests in flight end with EngineDead. A second call does nothing."""
        self._draining = True
        self._loading.cancel()
        await asyncio.wait([self._loading])
        self.on_lost(EngineDead("the server has stopped"))
        if self._client is not None:
            await self._client.stop()
        if self.pictures is not None:
            self.pictures.close()

    # ── what the client calls ──

    def on_step(self, step: StepOutput) -> None:
        if step.stats is not None:
            step.stats.keep_expert_counts(self.stats)
            self.stats = step.stats
        if step.outputs:
            self._apply(self._outputs.process(step.outputs, now=time.monotonic()))
        if step.pooled:
            self._pooling.receive(step.pooled)
        for loaded in step.adapters:
            loading = self._loads.get(loaded.load_id)
            if loading is not None and not loading.done():
                loading.set_result(loaded)
        if step.profile is not None:
            self._settle_profile(step.profile)
        self.residency.on_step(step)

    def on_refused(self, sequence_id: str, error: RequestError) -> None:
        loading = self._loads.get(sequence_id)
        if loading is not None:
            if not loading.done():
                loading.set_exception(error)
        elif not self._pooling.refuse(sequence_id, error):
            self._apply(self._outputs.refuse(sequence_id, error))

    def on_lost(self, error: RequestError) -> None:
        self.stats.queue_wait_s = 0.0  # of the next core nothing is known yet
        if self._processor is not None:
            self._wake(self._processor.lose_all(error))
        self._pooling.lose_all(error)
        for loading in self._loads.values():
            if not loading.done():
                loading.set_exception(EngineDead(error.message, retry_after_s=1))
        self._settle_profile(ProfileWritten("", error="the engine core was lost"))
        self.residency.on_lost()

    # ── inside ──

    @property
    def _outputs(self) -> OutputProcessor:
        if self._processor is None:
            raise EngineDead(_LOADING, code="loading", retry_after_s=1)
        return self._processor

    async def _load(self) -> None:
        """The tokenizer is read here while the core reads the weights."""
        try:
            files = await asyncio.to_thread(resolve, self.config, self._download.note)
            self._client = connect_cores(localized(self.config, files), self, self._connect)
            tokenizer = await asyncio.to_thread(load_model_tokenizer, self.config, files)
            info = await self._client.ready()
            check_vocab(tokenizer, info.vocab_size)
            if info.sees and files is not None:
                self.pictures = _picture_workers(self.config, files, tokenizer)
        except OctavoError as error:
            await self._fail_start(error)
            return
        except Exception as error:
            fault = machine_fault(error)
            if not fault:
                logger.exception("The engine failed to start")
            await self._fail_start(OctavoError(fault or f"{type(error).__name__}: {error}"))
            return
        self._tokenizer = tokenizer
        self._processor = OutputProcessor(tokenizer)
        self._info = info

    async def _fail_start(self, error: OctavoError) -> None:
        self._start_error = error
        if self._client is not None:
            await self._client.stop()

    def _check_open(self) -> None:
        if self._draining:
            raise EngineDead("the server is shutting down", code="draining", retry_after_s=5)
        health = self.health()
        if health.state == "loading":
            raise EngineDead(health.reason or _LOADING, code="loading", retry_after_s=1)
        if health.state in ("stalled", "dead"):
            raise EngineDead(health.reason, retry_after_s=1)

    def _check_queue(self, deadline_s: float | None) -> None:
        """Refuses at once what the core would refuse after its step. Raises QueueFull."""
        stats = self.stats
        if not stats.queue_wait_s or self.config.scheduler.policy != "fcfs":
            return
        late_s = stats.queue_wait_s - stats.longest_wait_s
        if deadline_s is not None:
            late_s = max(late_s, stats.queue_wait_s - deadline_s)
        if late_s > 0.0:
            raise QueueFull(
                f"{stats.num_waiting} requests are waiting, and this one would come {late_s:.1f} s "
                "too late for its deadline or for --queue-timeout; send it again later",
                retry_after_s=math.ceil(retry_after_s(late_s)),
            )

    async def _encode(self, prompt: str) -> list[int]:
        def work() -> list[int]:
            check_length(self.tokenizer, prompt, self.info.max_model_len, "prompt")
            return self.tokenizer.encode(prompt)

        return await off_loop(work, len(prompt))

    async def _settle(self, submission: Submission) -> SettledSubmission:
        """Validated, tokenised, with its seed. Raises a RequestError."""
        arrival_at = time.monotonic()
        self._check_open()
        check_task("generate" if submission.audio is None else "transcribe", self.info)
        deadline_s, prompt = submission.deadline_s, submission.prompt
        if submission.priority < BACKGROUND and not submission.resumed:
            self._check_queue(deadline_s)
        if isinstance(prompt, str):
            token_ids = await self._encode(prompt)
            self._check_open()  # it may have closed while a long prompt was tokenised
        else:
            token_ids = list(prompt)
        params = await tokenized_bad_words(submission.params, self.tokenizer)
        params = settle_params(token_ids, params, self.info, self.tokenizer, submission.resumed)
        check_choices(len(token_ids), params)
        return SettledSubmission(
            request_id=submission.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._seeds.settle(params.seed),
            eos_token_ids=ends_of_text(self.tokenizer, self.info.eos_token_ids),
            resumed=submission.resumed,
            arrival_at=arrival_at,
            deadline_at=None if deadline_s is None else arrival_at + deadline_s,
            priority=submission.priority,
            is_whole=(not submission.stream or params.output_kind is RequestOutputKind.FINAL_ONLY),
            cache_salt=submission.cache_salt,
            adapter=submission.adapter,
            media=submission.media,
            audio=submission.audio,
            labels=submission.labels,
            group=submission.group,
            can_move=submission.can_move,
            kv_source=submission.kv_source,
            retention=submission.retention,
            is_prefetch=submission.is_prefetch,
        )

    async def _submit(
        self, submission: Submission, inline: InlineSink[RequestOutput] | None
    ) -> tuple[TrackedRequest, OutputReader]:
        settled = await self._settle(submission)
        assert self._client is not None  # _check_open sees to it
        request, sequences = self._outputs.add(settled)
        try:
            if sequences:
                self._client.send(wire.add_answers(sequences))
        except (UnicodeEncodeError, wire.WireError) as error:
            self._send_abort(self._outputs.abort(request))
            raise InvalidRequest(f"the request cannot be sent to the engine: {error}") from None
        self._idle.clear()
        reader = self._readers[request] = OutputReader(
            request,
            silent=settled.is_whole,
            inline=inline,
            interval=max(self.config.stream_interval, settled.params.stream_interval or 1),
            suspend=partial(self._suspend, request),
        )
        return request, reader

    def _close(self, request: TrackedRequest) -> None:
        if not request.finished:
            # Behind a router clients have waited for longer than can be seen from here.
            has_left = not self.residency.is_watched
            self._send_abort(self._outputs.abort(request), has_left=has_left)
        del self._readers[request]
        if not self._readers:
            self._idle.set()

    def _suspend(self, request: TrackedRequest, on: bool) -> None:
        ids = [answer.sequence_id for answer in request.answers if not answer.finished]
        self._send(wire.Suspend(ids, on))

    def _settle_profile(self, written: ProfileWritten) -> None:
        future, self._profile = self._profile, None
        if future is not None and not future.done():
            future.set_result(written)

    def _apply(self, processed: Processed) -> None:
        self._send_abort(processed.aborts)
        self._wake(processed.touched)

    def _send(self, message: wire.ToEngine) -> None:
        if self._client is not None:
            self._client.send(message)

    def _send_abort(self, sequence_ids: list[str], *, has_left: bool = False) -> None:
        if sequence_ids and self._client is not None:
            self._client.send(wire.Abort(sequence_ids, has_left))

    def _wake(self, requests: Iterable[TrackedRequest]) -> None:
        """Their readers wake once everything received by now is processed: where steps come faster
        than they can be written, the outputs of several leave as one."""
        if not self._touched:
            asyncio.get_running_loop().call_soon(self._wake_readers)
        self._touched.update(dict.fromkeys(requests))

    def _wake_readers(self) -> None:
        touched, self._touched = self._touched, {}
        for request in touched:
            reader = self._readers.get(request)
            if reader is not None:  # else it has left
                reader.wake()
