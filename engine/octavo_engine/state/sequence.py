"""A request's progress: its tokens so far, how many are computed, and the blocks that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.state.request import BACKGROUND

if TYPE_CHECKING:
    from octavo_engine.state.adapter import HeldAdapter
    from octavo_engine.state.guesser import Guesser
    from octavo_engine.state.outputs import FinishReason
    from octavo_engine.state.request import EngineRequest
    from octavo_engine.state.sequence_grammar import SequenceGrammar


class Sequence:
    """One sequence from arrival to its end. The scheduler changes it; everyone else only reads.

    There is no prefill and no decode state: `num_computed_tokens` chases `num_tokens`, and the
    sequence samples in the step that catches up.

        token_ids   | prompt ...................... | output ........... |
        computed    | KV exists ................. |  (the last token sampled is never computed yet)
                    0                             num_computed_tokens    num_tokens
    """

    # Plain attributes in slots: the scheduler walks every running sequence twice a step.
    __slots__ = (
        "adapter",
        "adapter_slot",
        "added_at",
        "awaits",
        "block_table",
        "block_tables",
        "blocked_at",
        "blocked_until_step",
        "digests",
        "draft_saves",
        "finish_reason",
        "grammar",
        "group",
        "guesser",
        "held_from",
        "is_background",
        "long_until_step",
        "max_num_tokens",
        "media_end",
        "min_num_tokens",
        "needs_host",
        "num_admitted_tokens",
        "num_ahead",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_given_tokens",
        "num_missing_blocks",
        "num_preemptions",
        "num_promised_blocks",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_scored_tokens",
        "num_suspensions",
        "order",
        "queued_s",
        "request",
        "request_id",
        "rewind",
        "root",
        "row",
        "slot_blocked_at",
        "state_saves",
        "stop_ids",
        "tail_digest",
        "tiers_looked",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        max_num_tokens: int,
        order: tuple[float, int] = (0.0, 0),
        added_at: float = 0.0,
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_given_tokens = len(self.token_ids)  # known on arrival: the prompt and a resume
        self.num_computed_tokens = 0
        self.num_ahead = 0  # tokens behind them that a step under way computes
        self.num_scored_tokens = 0  # prompt positions whose log-probabilities were handed out
        self.row = -1  # in the runner's arrays; -1 when not running
        self.is_background = request.priority >= BACKGROUND
        self.group = "" if self.is_background else request.group
        self.order = order  # place under the policy; lower runs first
        self.finish_reason: FinishReason | None = None

        self.grammar: SequenceGrammar | None = None  # set before it is scheduled
        self.guesser: Guesser | None = None  # where tokens are guessed ahead
        self.adapter: HeldAdapter | None = None  # set before it is scheduled
        self.adapter_slot = -1  # of the backend, while it runs

        # Whether its next token cannot be chosen before the host knows the last one.
        self.needs_host = params.needs_host

        # The token behind its last picture; before that, tokens may be rows of pictures.
        self.media_end = request.media[-1].end if request.media else 0

        # When it ends.
        self.max_num_tokens = max_num_tokens
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        eos = () if params.ignore_eos else request.eos_token_ids
        self.stop_ids: frozenset[int] = frozenset(params.stop_token_ids).union(eos)

        # What of it lies in the KV pool (kept by kv.manager).
        self.block_table: list[int] = []  # of the first group of layers
        self.block_tables: list[list[int]] = [self.block_table]  # of all groups
        self.held_from: list[int] = []  # of each group, its first block; empty without windows
        self.root = b""  # of its digest chain
        self.tiers_looked = -1  # how often it was set back when they were last looked through
        self.digests: list[bytes] = []  # of its full blocks, as far as tokens are known
        self.tail_digest: bytes | None = None  # of a partly filled block at the end
        # Slots of snapshots of its state that a step under way saves, by their number of tokens.
        self.state_saves: dict[int, int] = {}
        # Likewise of states behind tokens that draft tokens follow.
        self.draft_saves: dict[int, int] = {}
        self.rewind = 0  # tokens behind which its state must be again before it goes on; 0: it is
        self.num_published_blocks = 0
        self.num_promised_blocks = 0  # that it will take for the rest of its chunks
        self.num_admitted_tokens = 0  # tokens to catch up with, when it last began to run
        self.num_cached_tokens = 0  # of the prompt, found in the cache at its first admission

        # Its fate while waiting (kept by the scheduler).
        self.added_at = added_at
        self.awaits: bytes | None = None  # digest of a block that another sequence is computing
        self.blocked_at: float | None = None  # since when memory does not suffice
        self.slot_blocked_at: float | None = None  # since when no slot is free for its adapter
        self.num_missing_blocks = 0  # that it needed then,
        self.blocked_until_step = 0  # and how long it is not looked up again for less
        self.long_until_step = 0  # how long it counts as a long prompt without another look
        self.num_preemptions = 0
        self.num_suspensions = 0
        self.queued_s = 0.0  # from arrival to its first admission

    def set_block_tables(self, tables: list[list[int]]) -> None:
        self.block_table, self.block_tables = tables[0], tables

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_launched_tokens(self) -> int:
        """Computed, or being computed by a step under way."""
        return self.num_computed_tokens + self.num_ahead

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_prompt_scores(self) -> bool:
        """Prompt log-probabilities were requested and some are still owed."""
        return (
            self.request.params.prompt_logprobs is not None
            and self.num_scored_tokens < self.num_prompt_tokens - 1
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, "
            f"tokens={self.num_prompt_tokens}+{self.num_output_tokens}, "
            f"computed={self.num_computed_tokens}, row={self.row}, finish={self.finish_reason})"
        )
