"""An engine client over several cores: each request goes to one of them, commands go to all."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.core.data_parallel.chosen_rank import CHOSEN_RANK
from octavo_engine.core.data_parallel.joint_health import join_health, join_info, rank_name
from octavo_engine.core.data_parallel.joint_stats import join_stats
from octavo_engine.core.data_parallel.prompt_placement import (
    CoreLoad,
    PromptRecord,
    choose_core,
    prompt_blocks,
)
from octavo_engine.core.data_parallel.residency_union import ResidencyUnion
from octavo_engine.core.process import wire
from octavo_engine.errors import EngineDead
from octavo_engine.state.outputs import EngineStats, ProfileWritten, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import CoreHealth, ModelInfo
    from octavo_engine.core.process.client import EngineClient, Listener
    from octavo_engine.errors import RequestError
    from octavo_engine.state.adapter import AdapterLoaded

logger = logging.getLogger(__name__)

MAX_ENDED = 1024  # sequences whose answer can still be labelled, as in each core


class CoreListenerOfRank:
    """What one core reports, with its rank."""

    def __init__(self, owner: DataParallelClient, rank: int) -> None:
        self.on_step = partial(owner.on_step_of, rank)
        self.on_refused = partial(owner.on_refused_by, rank)
        self.on_lost = partial(owner.on_lost_of, rank)


class RankedCore:
    """One core: its client, what is in flight there and what was sent there before."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.sequences: dict[str, int] = {}  # in flight: prompt tokens that are not computed yet
        self.pending_tokens = 0  # their sum
        self.prompts = PromptRecord(0)
        self.stats = EngineStats()
        self.is_new = False  # it was started again and knows of no command yet

    @property
    def is_ready(self) -> bool:
        return self.client.health().is_ready

    @property
    def is_down(self) -> bool:
        """Lost, and not back yet."""
        return self.is_new and not self.is_ready

    def add(self, sequence_id: str, pending_tokens: int) -> None:
        self.sequences[sequence_id] = pending_tokens
        self.pending_tokens += pending_tokens

    def note_output(self, sequence_id: str) -> None:
        """Its prompt is computed."""
        pending = self.sequences.get(sequence_id)
        if pending:
            self.pending_tokens -= pending
            self.sequences[sequence_id] = 0

    def remove(self, sequence_id: str) -> None:
        self.pending_tokens -= self.sequences.pop(sequence_id, 0)

    def lose(self) -> list[str]:
        """All that was in flight."""
        lost = list(self.sequences)
        self.sequences.clear()
        self.pending_tokens = 0
        self.prompts.clear()
        self.stats = EngineStats()
        self.is_new = True
        return lost


class DataParallelClient:
    """An EngineClient. `connect` makes the client of each core.

    A core that is lost ends its own requests with EngineDead, as if it had refused them; the others
    go on, and take all that comes until it is back.
    """

    def __init__(
        self,
        config: EngineConfig,
        listener: Listener,
        connect: Callable[[EngineConfig, Listener], EngineClient],
    ) -> None:
        self._listener = listener
        self._caches = config.scheduler.enable_prefix_caching
        self._size = config.data_parallel_size
        self._was_ready = False
        self._rank_of: dict[str, int] = {}  # of sequences in flight
        self._ended: OrderedDict[str, int] = OrderedDict()  # the last ones that are not any more
        self._residency = ResidencyUnion(self._size)
        self._is_watched = False
        self._loads: dict[str, tuple[set[int], AdapterLoaded | None]] = {}  # who has yet to answer
        self._profile: tuple[set[int], list[ProfileWritten]] | None = None
        self._cores: list[RankedCore] = []
        for rank in range(self._size):
            of_rank = config.replace(data_parallel_rank=rank)
            self._cores.append(RankedCore(connect(of_rank, CoreListenerOfRank(self, rank))))

    # ── what the engine calls ──

    async def ready(self) -> ModelInfo:
        infos = await asyncio.gather(*(core.client.ready() for core in self._cores))
        for core, info in zip(self._cores, infos, strict=True):
            core.prompts = PromptRecord(info.num_blocks // info.num_cache_groups)
        self._was_ready = True
        return join_info(infos)

    def health(self) -> CoreHealth:
        return join_health(
            [core.client.health() for core in self._cores], was_ready=self._was_ready
        )

    async def stop(self) -> None:
        await asyncio.gather(*(core.client.stop() for core in self._cores))

    def send(self, message: wire.ToEngine) -> None:
        match message:
            case wire.AddRequests():
                self._add(message)
            case wire.AddPooling(requests):
                tokens = {request.request_id: len(request.token_ids) for request in requests}
                self._place(message, tokens, [])
            case wire.Abort(ids, has_left):
                for rank, own in self._by_rank(ids).items():
                    self._cores[rank].client.send(wire.Abort(own, has_left))
                    for sequence_id in own:
                        self._end(rank, sequence_id)
            case wire.Suspend(ids, on):
                for rank, own in self._by_rank(ids).items():
                    self._cores[rank].client.send(wire.Suspend(own, on))
            case wire.Label(sequence_id):
                known = self._ended.get(sequence_id, self._rank_of.get(sequence_id))
                if known is not None:
                    self._cores[known].client.send(message)
            case wire.WatchResidency(on):
                self._watch(on=on)
            case wire.LoadAdapter():
                self._load_adapter(message)
            case wire.ProfileCommand(on, path):
                self._record(on=on, path=path)
            case wire.ResetPrefixCache() | wire.SleepCommand():
                for core in self._cores:
                    core.prompts.clear()
                self._send_all(message)
            case wire.UnloadAdapter():
                self._send_all(message)

    # ── requests ──

    def _add(self, message: wire.AddRequests) -> None:
        """The answers to one prompt stay together."""
        first = message.requests[0]
        prompt = first.prompt_token_ids or message.prompt
        blocks = prompt_blocks(first, prompt) if self._caches else []
        tokens = {request.request_id: 0 for request in message.requests}
        tokens[first.request_id] = len(prompt) + len(first.output_token_ids)
        self._place(message, tokens, blocks)

    def _place(
        self,
        message: wire.AddRequests | wire.AddPooling,
        tokens: dict[str, int],
        blocks: list[bytes],
    ) -> None:
        """`tokens` are those to compute, by sequence; `blocks` those that a core may hold."""
        chosen = CHOSEN_RANK.get()
        held = {
            rank: core.prompts.num_held(blocks) * BLOCK_SIZE
            for rank, core in enumerate(self._cores)
            if core.is_ready and chosen in (None, rank)
        }
        if not held:
            error = EngineDead(self.health().reason, retry_after_s=1)
            for sequence_id in tokens:
                self._listener.on_refused(sequence_id, copy(error))
            return
        loads = [
            CoreLoad(rank, len(core.sequences), core.pending_tokens, held[rank])
            for rank, core in enumerate(self._cores)
            if rank in held
        ]
        rank = choose_core(loads)
        core = self._cores[rank]
        core.client.send(message)
        core.prompts.note(blocks)
        for sequence_id, count in tokens.items():
            core.add(sequence_id, max(0, count - held[rank]))
            self._rank_of[sequence_id] = rank

    def _by_rank(self, sequence_ids: Iterable[str]) -> dict[int, list[str]]:
        """Those in flight."""
        own: dict[int, list[str]] = {}
        for sequence_id in sequence_ids:
            rank = self._rank_of.get(sequence_id)
            if rank is not None:
                own.setdefault(rank, []).append(sequence_id)
        return own

    def _end(self, rank: int, sequence_id: str) -> None:
        if self._rank_of.pop(sequence_id, None) is None:
            return
        self._cores[rank].remove(sequence_id)
        self._ended[sequence_id] = rank
        if len(self._ended) > MAX_ENDED * self._size:
            self._ended.popitem(last=False)

    # ── commands to all ──

    def _send_all(self, message: wire.ToEngine) -> set[int]:
        """The ranks that got it."""
        ready = {rank for rank, core in enumerate(self._cores) if core.is_ready}
        for rank in ready:
            self._cores[rank].client.send(message)
        return ready

    def _watch(self, *, on: bool) -> None:
        self._is_watched = on
        ready = self._send_all(wire.WatchResidency(on))
        for rank in ready:
            self._cores[rank].is_new = False
        if on:
            self._residency.watch(ready)
        else:
            self._residency.clear()

    def _load_adapter(self, message: wire.LoadAdapter) -> None:
        ready = self._send_all(message)
        if ready:
            self._loads[message.load_id] = (ready, None)
        else:
            error = EngineDead(self.health().reason, retry_after_s=1)
            self._listener.on_refused(message.load_id, error)

    def _record(self, *, on: bool, path: str) -> None:
        if on:
            self._send_all(wire.ProfileCommand(on=True))
            return
        awaited = set()
        for rank, core in enumerate(self._cores):
            if core.is_ready:
                core.client.send(wire.ProfileCommand(on=False, path=profile_path(path, rank)))
                awaited.add(rank)
        self._profile = (awaited, [])
        self._settle_profile()

    # ── what the cores report ──

    def on_step_of(self, rank: int, step: StepOutput) -> None:
        core = self._cores[rank]
        if core.is_new:
            core.is_new = False
            if self._is_watched:
                core.client.send(wire.WatchResidency(on=True))
        for output in step.outputs:
            core.note_output(output.request_id)
            if output.finish_reason is not None:
                self._end(rank, output.request_id)
        for pooled in step.pooled:
            self._end(rank, pooled.request_id)
        if step.profile is not None and self._profile is not None:
            self._profile[1].append(step.profile)
            self._settle_profile(rank)
        residency = step.residency
        joint = msgspec.structs.replace(
            step,
            profile=None,
            adapters=[done for loaded in step.adapters if (done := self._loaded(rank, loaded))],
            residency=None if residency is None else self._residency.apply(rank, residency),
        )
        if step.stats is not None:
            step.stats.keep_expert_counts(core.stats)
            core.stats = step.stats
            joint.stats = self._stats()
        self._listener.on_step(joint)

    def on_refused_by(self, rank: int, sequence_id: str, error: RequestError) -> None:
        if sequence_id in self._loads:
            _, loaded = self._loads.pop(sequence_id)
            if loaded is not None:
                self._send_all(wire.UnloadAdapter(loaded.digest))
        self._end(rank, sequence_id)
        self._listener.on_refused(sequence_id, error)

    def on_lost_of(self, rank: int, error: RequestError) -> None:
        """Its requests are over; those of the others are not."""
        error = EngineDead(
            f"{rank_name(rank, self._size)}: {error.message}", retry_after_s=error.retry_after_s
        )
        core = self._cores[rank]
        for sequence_id in core.lose():
            self._rank_of.pop(sequence_id, None)
            self._listener.on_refused(sequence_id, copy(error))
        self._lose_answers(rank, error)
        step = StepOutput(stats=self._stats(), residency=self._residency.lose(rank))
        if not all(core.is_down for core in self._cores):
            self._listener.on_step(step)
        else:
            self._is_watched = False
            self._residency.clear()
            self._listener.on_lost(error)

    # ── inside ──

    def _stats(self) -> EngineStats:
        return join_stats([core.stats for core in self._cores])

    def _loaded(self, rank: int, loaded: AdapterLoaded) -> AdapterLoaded | None:
        """Once it is in all cores."""
        if loaded.load_id not in self._loads:  # another core refused it
            self._cores[rank].client.send(wire.UnloadAdapter(loaded.digest))
            return None
        awaited, _ = self._loads[loaded.load_id]
        awaited.discard(rank)
        self._loads[loaded.load_id] = (awaited, loaded)
        if awaited:
            return None
        del self._loads[loaded.load_id]
        return loaded

    def _lose_answers(self, rank: int, error: RequestError) -> None:
        """It will not answer a command any more; one that all others answered is done."""
        for load_id, (awaited, loaded) in list(self._loads.items()):
            awaited.discard(rank)
            if awaited:
                continue
            del self._loads[load_id]
            if loaded is None:
                self._listener.on_refused(load_id, copy(error))
            else:
                self._listener.on_step(StepOutput(adapters=[loaded]))
        if self._profile is not None:
            self._settle_profile(rank)

    def _settle_profile(self, rank: int | None = None) -> None:
        """All files are written, or their cores are gone."""
        assert self._profile is not None
        awaited, written = self._profile
        if rank is not None:
            awaited.discard(rank)
        if awaited:
            return
        self._profile = None
        errors = [each.error for each in written if each.error is not None]
        if not written:
            errors = ["the engine cores were lost"]
        joint = ProfileWritten(
            written[0].path if written else "",
            sum(each.events for each in written),
            "; ".join(errors) or None,
        )
        self._listener.on_step(StepOutput(profile=joint))


def profile_path(path: str, rank: int) -> str:
    """Of one core's recording: octavo-1.json.gz, octavo-1-rank1.json.gz, …"""
    if rank == 0:
        return path
    file = Path(path)
    suffixes = "".join(file.suffixes)
    return str(file.with_name(f"{file.name.removesuffix(suffixes)}-rank{rank}{suffixes}"))
