"""The engine: schedule, compute, take in the result. One thread owns it; nothing in it waits."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from octavo_engine.core.ahead import Ahead
from octavo_engine.core.expert_layers import ExpertLayers
from octavo_engine.core.pooling.async_pooling import WrongTask
from octavo_engine.core.process.heartbeat import Heartbeat
from octavo_engine.core.refusals import refusal_of
from octavo_engine.errors import DeviceLost, InvalidRequest, ModelError, OctavoError, WorkerLost
from octavo_engine.executor.executor import (
    CountsExpertTokens,
    LosesDevice,
    ReleasesKV,
    ReleasesWeights,
    TimesPictures,
    WarmsUp,
    WatchesWorkers,
)
from octavo_engine.profile import Lapped
from octavo_engine.sampling.processors import ProcessorRegistry
from octavo_engine.state.audio import AudioWindow
from octavo_engine.state.batch import ScheduledBatch
from octavo_engine.state.outputs import EngineStats, SequenceOutput, StepOutput, StepResult
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.core.adapters import AdapterQueue
    from octavo_engine.core.audio_queue import AudioQueue
    from octavo_engine.core.grammar_queue import GrammarQueue
    from octavo_engine.core.kv_events.publisher import KVEventPublisher
    from octavo_engine.core.kv_events.recorder import KVEventRecorder
    from octavo_engine.core.kv_tiers import KVTiers
    from octavo_engine.errors import RequestError
    from octavo_engine.executor.executor import Executor, LaunchesBatches
    from octavo_engine.grammar.run import GrammarRun
    from octavo_engine.profile import StepProfile
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.state.adapter import AdapterLoaded, HeldAdapter
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.pooling import PoolingRequest

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then something is broken that no request is to blame for
_COUNTERS = (
    "steps", "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "prefix_queries",
    "prefix_hits", "preemptions", "nan_failures", "spec_drafts", "spec_draft_tokens",
    "spec_accepted_tokens",
)  # fmt: skip


class Engine:
    """Requests in, steps on demand, outputs of sequences out."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        launches: LaunchesBatches | None = None,
        max_under_way: int = 2,
        counts_experts: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`launches` is the executor again if steps are to be launched ahead, and `max_under_way`
        how many of them there may be. `counts_experts`: its figures have each expert's."""
        self.scheduler = scheduler
        self.executor = executor
        self.heartbeat = Heartbeat(now)
        self._ahead: Ahead | None = None
        if launches is not None:
            self._ahead = Ahead(
                scheduler, launches, self.heartbeat, max_under_way=max_under_way, now=now
            )
        self.last_step_was_empty = False
        self.profile: StepProfile | None = None
        self._now = now
        self._processors = ProcessorRegistry()
        self._live: set[str] = set()  # request ids taken in and not finished
        self._failed_steps = 0
        self._make_grammars: Callable[[], GrammarQueue] | None = None
        self._grammars: GrammarQueue | None = None  # made when first needed
        self._adapters: AdapterQueue | None = None
        self._audio: AudioQueue | None = None  # of models that read audio
        self._adapted: dict[str, HeldAdapter] = {}  # of requests that wait for their grammar
        self._tiers: KVTiers | None = None
        self._loaded: list[AdapterLoaded] = []
        self._refused: list[tuple[str, RequestError]] = []
        self._kv_events: tuple[KVEventRecorder, KVEventPublisher] | None = None
        self._warm_up_stats = EngineStats()  # not part of what users count
        self._expert_counts = executor if isinstance(executor, CountsExpertTokens) else None
        self._expert_layers = ExpertLayers(now) if counts_experts else None

    @property
    def has_work(self) -> bool:
        return (
            self.scheduler.has_work
            or bool(self._grammars)
            or (self._adapters is not None and self._adapters.has_work)
            or bool(self._audio)
            or bool(self._refused)
            or bool(self._ahead)
        )

    def add(self, request: EngineRequest) -> None:
        """Take a request in. Raises RequestError: it is full, or this one can never be served."""
        self._processors.resolve(request.params.logits_processors)
        if self._audio is not None:
            placed = self._audio.submit(request)
            if placed is None:
                self._live.add(request.request_id)
                return  # it comes in line once its audio is encoded
            self._compile_heard(self._audio, placed)
            return
        adapter = None
        if request.adapter is not None:
            adapter = self._adapter_queue("model").submit(request)
            if adapter is None:
                return  # it comes in line once its adapter is read
        self._compile(request, adapter)

    def load_adapter(self, load_id: str, path: str, *, is_pinned: bool = False) -> None:
        """Read an adapter into the host's memory. What comes of it is in the output of a step, or
        among the refused."""
        self._adapter_queue("lora_name").load(load_id, path, is_pinned=is_pinned)

    def unload_adapter(self, digest: str) -> None:
        """Forget it. Requests that have it keep it; those to come read it again."""
        if self._adapters is not None:
            self._adapters.unload(digest)

    def add_pooling(self, requests: Sequence[PoolingRequest]) -> None:
        raise WrongTask("this model generates; it has no embeddings or scores", param="model")

    def abort(self, request_id: str, *, has_left: bool = False) -> SequenceOutput | None:
        """End a sequence now, wherever it stands. Unknown or finished: None."""
        self._live.discard(request_id)
        self._adapted.pop(request_id, None)
        if self.profile is not None:
            self.profile.leave(request_id)
        if self._audio is not None:
            self._audio.release([request_id])
            if (out := self._audio.abort(request_id)) is not None:
                return out
        if self._adapters is not None and (out := self._adapters.abort(request_id)) is not None:
            return out
        if self._grammars is not None and (out := self._grammars.abort(request_id)) is not None:
            return out
        return self.scheduler.abort(request_id, has_left=has_left)

    def suspend(self, request_id: str, *, on: bool) -> None:
        self.scheduler.suspend(request_id, on=on)

    def step(self) -> StepOutput:
        """Compute one batch. What a whole step raises fails the sequences in it, not the engine."""
        profile, was_under_way = self.profile, bool(self._ahead)
        if profile is not None:
            profile.start_step()
        if self._tiers is not None:
            self._tiers.settle()
        ended = [] if self._adapters is None else self._settle_adapters(self._adapters)
        if self._grammars is not None:
            ended += self._settle_grammars(self._grammars)
        outputs: list[SequenceOutput] = []
        if self._audio is not None:
            ended += self._encode_audio(self._audio)
        batch = self._turn(outputs) if self._ahead is None else self._turn_ahead(outputs)
        outputs += [*self.scheduler.take_finished(), *ended]
        finished = [o.request_id for o in outputs if o.finish_reason is not None]
        self._live.difference_update(finished)
        if self._audio is not None:
            self._audio.release([*finished, *(request_id for request_id, _ in self._refused)])
        self.last_step_was_empty = is_empty = batch.is_empty and not was_under_way
        if is_empty and not outputs and not self._refused:
            self._wait(0.002)  # for a caller that steps without a pause
        report = self.report(outputs)
        if profile is not None and not is_empty and report.stats is not None:
            profile.laps.mark("report")
            profile.end_step(batch, outputs, report.stats)
        return report

    def record(self, profile: StepProfile | None) -> None:
        self.profile = profile
        laps = None if profile is None else profile.laps
        for part in (self.executor, self._ahead):
            if isinstance(part, Lapped):
                part.laps = laps

    def report(self, outputs: list[SequenceOutput]) -> StepOutput:
        """All there is to report after a step, or after a command when there was none."""
        residency = self.scheduler.kv.residency.take()
        if self._kv_events is not None:
            recorder, publisher = self._kv_events
            batch = recorder.take()
            if batch is not None:
                publisher.publish(batch)
        loaded, self._loaded = self._loaded, []
        return StepOutput(outputs=outputs, stats=self.stats(), residency=residency, adapters=loaded)

    def watch_workers(self, when_lost: Callable[[WorkerLost], None]) -> None:
        """Call it, on any thread, when a process that computes with this one has ended."""
        if isinstance(self.executor, WatchesWorkers):
            self.executor.watch_workers(when_lost)

    def use_grammars(self, make: Callable[[], GrammarQueue]) -> None:
        """How to get what compiles grammars; it is made when a request first brings one."""
        self._make_grammars = make

    def use_adapters(self, adapters: AdapterQueue) -> None:
        """What reads LoRA adapters. The scheduler has slots for them."""
        self._adapters = adapters

    def use_audio(self, audio: AudioQueue) -> None:
        """What encodes audio; every request must have some."""
        self._audio = audio

    def use_tiers(self, tiers: KVTiers) -> None:
        """What holds KV blocks beside the pool; after the warm-up, which is not to be found."""
        self._tiers = self.scheduler.tiers = tiers
        if self._ahead is not None:
            self._ahead.when_reported = tiers.save

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call it, on any thread, when `serve_blocks` or a step has something to do."""
        if self._tiers is not None:
            self._tiers.wake = wake
        if self._adapters is not None:
            self._adapters.wake = wake

    def serve_blocks(self) -> None:
        """Copy KV blocks that other engines wait for; a step does so too."""
        if self._tiers is not None:
            self._tiers.serve()

    def take_refused(self) -> list[tuple[str, RequestError]]:
        """Requests that were taken in and cannot be served after all; each is handed out once."""
        refused, self._refused = self._refused, []
        return refused

    def label(self, request_id: str, labels: Labels) -> None:
        """Labels for the answer of a sequence that ended lately."""
        self.scheduler.kv.residency.label(request_id, labels)

    def watch(self, *, on: bool) -> None:
        """Report which labels are true from now on, or no longer."""
        self.scheduler.kv.residency.watch(on=on)

    def stats(self) -> EngineStats:
        stats, before = self.scheduler.stats(), self._warm_up_stats
        for counter in _COUNTERS:
            setattr(stats, counter, getattr(stats, counter) - getattr(before, counter))
        if self._expert_counts is not None:
            stats.expert_rank_tokens = self._expert_tokens(before.expert_rank_tokens)
            if self._expert_layers is not None:
                counts = self._expert_counts.expert_layer_tokens
                stats.expert_layer_tokens = self._expert_layers.take(
                    counts, is_idle=not self.has_work
                )
        if self._adapters is not None:
            self._adapters.add_stats(stats)
        if self._audio is not None:
            stats.num_waiting += len(self._audio)
            stats.mm_cache_queries = self._audio.num_encoded + self._audio.num_hits
            stats.mm_cache_hits = self._audio.num_hits
            stats.mm_encode_seconds = self._audio.encode_seconds
        if self._tiers is not None:
            stats.tiers = self._tiers.read_stats()
            stats.queued_tokens -= self._tiers.num_followed_tokens
        if self._grammars is not None:
            compiles = self._grammars.compiler.stats
            stats.num_waiting += len(self._grammars)
            stats.num_waiting_grammar = len(self._grammars)
            stats.grammar_cache_hits = compiles.hits
            stats.grammar_failures = compiles.failures
            stats.grammar_compile_counts = list(compiles.counts)
            stats.grammar_compile_seconds = compiles.seconds
        return stats

    def _expert_tokens(self, before: list[int]) -> list[int]:
        assert self._expert_counts is not None
        now = self._expert_counts.expert_rank_tokens()
        return [count - (before[rank] if before else 0) for rank, count in enumerate(now)]

    def reset_prefix_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache()

    def sleep(self, *, on: bool, level: int = 1) -> None:
        """As `CoreEngine.sleep`. With work at hand nothing is done."""
        if on and self._tiers is not None and not self.has_work:
            self._tiers.flush()
        if on and (self.has_work or not self.reset_prefix_cache()):
            return
        self.heartbeat.pause()
        executor = self.executor
        if self._audio is not None and on:
            self._audio.forget_windows()
        if isinstance(executor, ReleasesKV) and on:
            executor.release_kv()
        if isinstance(executor, ReleasesWeights):
            if on:
                executor.release_weights(keep=level == 1)
            else:
                executor.restore_weights()
        if isinstance(executor, ReleasesKV) and not on:
            executor.restore_kv()

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first request finds memory touched and times known.
        Nobody's clock runs yet, so all that can be compiled is compiled here."""
        if isinstance(self.executor, WarmsUp):
            self.executor.warm_up(self.heartbeat)
        if self.scheduler.media is not None and isinstance(self.executor, TimesPictures):
            # A large tower takes seconds: unexpected ones would look as if the core hung.
            self.scheduler.media.expect(self.executor.time_picture())
        length = min(16, self.scheduler.config.max_model_len - 2)
        if length < 1:
            return
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        audio = None
        if self._audio is not None:
            rows, columns = self._audio.shape
            audio = AudioWindow(bytes(16), bytes(4 * rows * columns))
        self.add(
            EngineRequest(
                request_id="warm-up", prompt_token_ids=[0] * length, params=params, audio=audio
            )
        )
        while self.has_work:
            for output in self.step().outputs:
                if output.finish_reason == "error":
                    raise ModelError(f"the model cannot compute: {output.error}")
        self.reset_prefix_cache()
        self._warm_up_stats = self.scheduler.stats()
        if self._expert_counts is not None:
            self._warm_up_stats.expert_rank_tokens = self._expert_tokens([])
            if self._expert_layers is not None:
                self._expert_layers.forget(self._expert_counts.expert_layer_tokens())
        if self._audio is not None:
            self._audio.forget_counts()

    def tell_kv_events(self, recorder: KVEventRecorder, publisher: KVEventPublisher) -> None:
        """From now on what the prefix cache holds is published, beginning with: nothing."""
        self.reset_prefix_cache()
        self.scheduler.kv.listen(recorder)
        if self._tiers is not None:
            self._tiers.report_to(recorder.follow_tiers())
        recorder.cleared()
        self._kv_events = (recorder, publisher)

    def close(self) -> None:
        if self._kv_events is not None:
            self._kv_events[1].close()
        if self._tiers is not None:
            self._tiers.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._grammars is not None:
            self._grammars.close()
        self.executor.close()

    def _turn(self, outputs: list[SequenceOutput]) -> ScheduledBatch:
        """Plan a batch, compute it, and add what came of it. Returns the batch."""
        batch = ScheduledBatch()
        try:
            batch = self.scheduler.schedule()
            if self.profile is not None:
                self.profile.laps.mark("schedule")
            if not batch.is_empty:
                outputs += self._compute(batch)
            self._failed_steps = 0
        except Exception as error:
            outputs += self._fail([batch], error)
        return batch

    def _turn_ahead(self, outputs: list[SequenceOutput]) -> ScheduledBatch:
        """The same where a batch is launched before the last one is done."""
        assert self._ahead is not None
        num_landed = self._ahead.num_landed
        try:
            batch = self._ahead.turn(outputs)
            if self._ahead.num_landed > num_landed:
                self._failed_steps = 0
        except Exception as error:
            batches = self._ahead.drop()
            batch = batches[-1] if batches else ScheduledBatch()
            outputs += self._fail(batches, error)
        return batch

    def _compute(self, batch: ScheduledBatch) -> list[SequenceOutput]:
        self.heartbeat.expect(self.scheduler.expected_s(batch))
        started = self._now()
        result = self.executor.execute(batch)
        step_s = self._now() - started
        if self.profile is not None:
            self.profile.laps.mark("results")
        outputs = self.scheduler.update(batch, result, step_s)
        if self._tiers is not None:
            self._tiers.save()
        if self.profile is not None:
            self.profile.laps.mark("update")
        return outputs

    def _compile(self, request: EngineRequest, adapter: HeldAdapter | None) -> None:
        """Put it in line, now or once its grammar is compiled. Raises RequestError."""
        grammar = None
        if request.params.grammar is not None:
            grammar = self._submit_grammar(request)
            if grammar is None:
                if adapter is not None:
                    self._adapted[request.request_id] = adapter
                return
        self._take_in(request, grammar, adapter)

    def _compile_heard(self, audio: AudioQueue, request: EngineRequest) -> None:
        """Of one whose window is in a slot, which it gives back if it is refused."""
        try:
            self._compile(request, None)
        except BaseException:
            audio.release([request.request_id])
            raise

    def _take_in(
        self, request: EngineRequest, grammar: GrammarRun | None, adapter: HeldAdapter | None
    ) -> None:
        self.scheduler.add(request, grammar, adapter)
        self._live.add(request.request_id)
        if self.profile is not None:
            self.profile.waits(request.request_id)

    def _refuse(self, request_id: str, error: Exception) -> None:
        """One that has waited, and cannot be put in line."""
        self._live.discard(request_id)
        self._refused.append((request_id, refusal_of(error, request_id)))

    def _submit_grammar(self, request: EngineRequest) -> GrammarRun | None:
        if self._grammars is None:
            if self._make_grammars is None:
                raise InvalidRequest("this engine has no grammars", param="response_format")
            self._grammars = self._make_grammars()
        return self._grammars.submit(request)

    def _settle_grammars(self, grammars: GrammarQueue) -> list[SequenceOutput]:
        """Put those in line whose grammar is compiled. Returns what ended instead."""
        ready, refused, finished = grammars.settle()
        self._refused += refused
        for request, grammar in ready:
            try:
                adapter = self._adapted.pop(request.request_id, None)
                self._take_in(request, grammar, adapter)
            except Exception as error:
                self._refuse(request.request_id, error)
        for output in finished:
            self._adapted.pop(output.request_id, None)
        for request_id, _ in refused:
            self._adapted.pop(request_id, None)
        return finished

    def _encode_audio(self, audio: AudioQueue) -> list[SequenceOutput]:
        """Some of the encoder's work. Returns what ended instead of being encoded."""
        if not audio:
            return []
        ended = audio.take_late()
        self.heartbeat.expect(audio.expected_s())
        try:
            ready = audio.advance(is_busy=self.scheduler.has_work)
        except Exception:
            logger.exception("Audio could not be encoded")
            message = "the engine failed to encode the audio"
            return ended + [
                SequenceOutput(request_id=request_id, finish_reason="error", error=message)
                for request_id in audio.take_all()
            ]
        for request in ready:
            try:
                self._compile_heard(audio, request)
            except Exception as error:
                self._refuse(request.request_id, error)
        return ended

    def _adapter_queue(self, param: str) -> AdapterQueue:
        if self._adapters is None:
            raise InvalidRequest(
                "this server takes no LoRA adapters; start it with --enable-lora", param=param
            )
        return self._adapters

    def _settle_adapters(self, adapters: AdapterQueue) -> list[SequenceOutput]:
        """Take those further whose adapter is read. Returns what ended instead."""
        settled = adapters.settle()
        self._refused += settled.refused
        self._loaded += settled.loaded
        for request, adapter in settled.ready:
            try:
                self._compile(request, adapter)
            except Exception as error:
                self._refuse(request.request_id, error)
        return settled.finished

    def _wait(self, timeout_s: float) -> None:
        if self._grammars is not None and len(self._grammars):
            self._grammars.wait(timeout_s)
        elif self._adapters is not None and self._adapters.has_work:
            self._adapters.wait(timeout_s)
        elif self._tiers is not None and self._tiers.is_fetching:
            self._tiers.wait(timeout_s)

    def _fail(self, batches: Sequence[ScheduledBatch], error: Exception) -> list[SequenceOutput]:
        """End what was being computed; if not even that is known, end all there is."""
        if isinstance(error, WorkerLost):
            raise error  # nothing can be computed any more
        if isinstance(self.executor, LosesDevice) and self.executor.device_is_lost():
            raise DeviceLost(
                f"the device computes nothing any more: {type(error).__name__}: {error}"
            ) from error
        self._failed_steps += 1
        logger.exception("A step failed", extra={"in_a_row": self._failed_steps})
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise OctavoError(
                f"{self._failed_steps} steps in a row failed, the last with "
                f"{type(error).__name__}: {error}"
            ) from error
        failed = [
            request_id for batch in batches for request_id in self.scheduler.take_back(batch)
        ] or sorted(self._live)
        message = f"the engine failed to compute a step: {type(error).__name__}"
        outputs = [
            SequenceOutput(request_id=request_id, finish_reason="error", error=message)
            for request_id in failed
            if self.scheduler.abort(request_id) is not None
        ]
        for batch in batches:  # rows of what was just ended are free once the batch is settled
            if not batch.is_empty:
                self.scheduler.update(batch, StepResult([-1] * len(batch.sequences)), 0.0)
        return outputs
