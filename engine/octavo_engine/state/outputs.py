"""What a step yields: from the runner to the scheduler, and from the core to its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from octavo_engine.state.adapter import AdapterLoaded  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.labels import ResidencyChange  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.pooling import PoolingOutput  # noqa: TC001

FinishReason = Literal["stop", "length", "abort", "error", "deadline", "repetition"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of the most likely ones at its position."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely
    top_ids: list[int]
    top_logprobs: list[float]
    # Of a prompt position that is aligned with audio: float16, [heads, rows of the window].
    attention: bytes = b""


@dataclass(slots=True)
class StepResult:
    """What the executor computed, in the order of the batch's sequences."""

    tokens: list[int]  # the sampled token, or -1 where none was sampled
    failed: list[int] = field(default_factory=list)  # entries of which no token could be chosen,
    forbidden: list[int] = field(default_factory=list)  # and of these, whose request allows none
    logprobs: dict[int, list[TokenLogprobs]] = field(
        default_factory=dict
    )  # by entry, where requested
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # this chunk's
    accepted: dict[int, list[int]] = field(default_factory=dict)  # by entry: drafts that came true
    forced: dict[int, list[int]] = field(default_factory=dict)  # what must follow the sampled token
    encode_s: float = 0.0  # that the picture of the step took, or some of its parts
    encode_error: str | None = None  # the name of what went wrong with it
    deferred: list[int] = field(default_factory=list)  # entries whose mask was late: not sampled
    proposed: dict[int, list[int]] = field(default_factory=dict)  # by entry: what may come next,
    sureness: dict[int, list[int]] = field(default_factory=dict)  # and its levels, where known
    draft_passes: int = 0  # of a draft model, or heads that were computed, which took
    draft_tokens: int = 0  # in the first of them
    draft_s: float = 0.0  # so many seconds
    draft_is_usual: bool = True  # such passes take so long from now on
    is_usual: bool = True  # and such steps


class SequenceOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a step added to one sequence."""

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop id that ended it; None for end of text
    is_whole: bool = False  # with "stop": its grammar was complete; the last token is text
    error: str | None = None  # one sentence, with finish_reason "error"
    is_refused: bool = False  # with "error": the request is at fault, not the model
    num_cached_tokens: int = 0  # prompt tokens taken from the cache; in the first output
    queued_s: float | None = None  # from arrival to the first step; in the first output
    logprobs: list[TokenLogprobs] = []  # one a token, where requested
    prompt_logprobs: list[
        TokenLogprobs
    ] = []  # of the prompt positions computed since the last output


class TierStats(msgspec.Struct, kw_only=True):
    """Of the tiers that hold KV blocks beside the pool; counters only grow."""

    host_blocks: int = 0  # that are there now
    host_bytes: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    shared_blocks: int = 0
    shared_bytes: int = 0
    saved_bytes: int = 0  # copied out of the pool
    unsaved_blocks: int = 0  # not written to files: too much waited, no room or an error
    loaded_bytes: int = 0  # brought back into the pool
    host_hit_blocks: int = 0
    disk_hit_blocks: int = 0
    shared_hit_blocks: int = 0
    peer_hit_blocks: int = 0  # from other engines
    host_load_seconds: float = 0.0  # of copies into the pool
    disk_load_seconds: float = 0.0  # of reads
    shared_load_seconds: float = 0.0
    peer_load_seconds: float = 0.0
    peer_failures: int = 0  # connections that broke, were refused or too slow
    served_bytes: int = 0  # copied for other engines
    failed_reads: int = 0  # blocks that were gone or damaged, and reads that took too long
    refused: int = 0  # loads that would have taken longer than computing


class EngineStats(msgspec.Struct, kw_only=True):
    """Where the engine stands; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0  # prompt tokens that wait or are still to be computed
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # held by sequences; cached but free ones do not count
    kv_blocks_retained: int = 0  # that requests retain after their end
    retention_refused_blocks: int = 0  # beyond a limit
    retention_given_up_blocks: int = 0  # before their time was over
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of those, found
    preemptions: int = 0
    nan_failures: int = 0
    prompt_tokens_cached: int = 0  # of `prompt_tokens`, those that were not computed again
    num_waiting_grammar: int = 0  # of `num_waiting`, those whose grammar is being compiled
    num_waiting_adapter: int = 0  # of `num_waiting`, those whose adapter is being read
    step_ms: float = 0.0  # of the last step
    step_tokens: int = 0  # computed in it
    spec_drafts: int = 0  # sequences times steps with tokens that were guessed
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_per_pos: list[int] = []  # of the first guess, of the second, …
    # Rows that the experts of each rank computed; empty where none has experts of its own.
    expert_rank_tokens: list[int] = []
    # With --expert-metrics: rows for which each expert was chosen, by layer. Empty: they are sent
    # now and then, and not with these.
    expert_layer_tokens: list[list[int]] = []
    grammar_cache_hits: int = 0
    grammar_failures: int = 0  # grammars that did not compile, or not in time
    grammar_compile_counts: list[int] = []  # by grammar.buckets
    grammar_compile_seconds: float = 0.0  # in all
    last_step_at: float = 0.0  # monotonic seconds
    prefill_tokens_per_s: float = 0.0  # lately; 0 while unknown
    queue_wait_s: float = 0.0  # foreseen for one that comes now; 0 while unknown
    running_adapters: list[str] = []  # names, of the sequences that run
    waiting_adapters: list[str] = []  # of those that wait
    mm_cache_queries: int = 0  # pictures and windows of audio that requests needed
    mm_cache_hits: int = 0  # of those, encoded already
    mm_encode_seconds: float = 0.0
    num_adapters_held: int = 0  # in the host's memory
    adapter_load_counts: list[int] = []  # by metrics.SECONDS_BUCKETS
    adapter_load_seconds: float = 0.0  # in all
    adapter_load_failures: int = 0
    tiers: TierStats | None = None  # of KV blocks beside the pool, where there are any
    longest_wait_s: float = 0.0  # a request that would wait longer is refused; 0: none waits
    cores: list[EngineStats] = []  # those that these are the sum of, where there are several

    def keep_expert_counts(self, before: EngineStats) -> None:
        """Those that came last, where none came with these."""
        if not self.expert_layer_tokens:
            self.expert_layer_tokens = before.expert_layer_tokens


class ProfileWritten(msgspec.Struct, frozen=True):
    """What became of a recording of steps."""

    path: str
    events: int = 0
    error: str | None = None  # one sentence


class StepOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The one message a step sends from the core to its client."""

    outputs: list[SequenceOutput] = []
    stats: EngineStats | None = None
    residency: ResidencyChange | None = None  # only while it is watched
    pooled: list[PoolingOutput] = []
    profile: ProfileWritten | None = None
    adapters: list[AdapterLoaded] = []
