"""What the runner needs from any backend: load a model, hold KV blocks, execute a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.caches import CacheLayout
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.sampling.batch import Sampled, SamplingBatch
    from octavo_engine.state.adapter import PackedAdapter
    from octavo_engine.weights.adapter import AdapterFiles


# Hidden states, a row each: [rows, columns]. A device that launches drafts keeps them.
States: TypeAlias = Any
_Ints: TypeAlias = "NDArray[np.int32]"
_NativeArrays: TypeAlias = "tuple[_Ints, _Ints, _Ints, _Ints, _Ints, _Ints, _Ints, _Ints]"


class StateStep(NamedTuple):
    """Where a step reads and leaves recurrent states, in slots that hold those of all layers."""

    slots: NDArray[np.int32]  # [B]  where each sequence's state is, and stays
    saves: NDArray[np.int32]  # [T]  the slot where it is saved too, behind this token; -1: none
    copies: NDArray[np.int32]  # [C, 2]  source slot, target slot; done before the step


@dataclass(slots=True)
class BackendStep:
    """One step as flat arrays: B sequences, T tokens, S rows of logits, R rows of the runner's, G
    groups of layers that share block tables (`CacheLayout`).

    Sequence b owns tokens [seq_starts[b], seq_starts[b + 1]); they are the last ones of its
    `seq_lens[b]` tokens. Its block table in group g is `block_tables[g, rows[b]]`; what of that its
    tokens do not see through the group's window may be anything.
    """

    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    slots: NDArray[np.int32]  # [G, T]  block id * 16 + offset: where the token's k and v go
    seq_starts: NDArray[np.int32]  # [B + 1]
    seq_lens: NDArray[np.int32]  # [B]  tokens of the sequence once this step is done
    rows: NDArray[np.int32]  # [B]
    block_tables: NDArray[np.int32]  # [G, R, blocks per sequence]
    logit_rows: NDArray[np.int32]  # [S]  which tokens' logits are wanted
    copies: NDArray[np.int32]  # [C, 3]  source block, target block, tokens; done before the step
    # [T]  the row whose token, sampled by a step still under way, this one is; -1: it is known.
    # None: all are.
    awaited: NDArray[np.int32] | None = None
    # [R]  how often each row of `block_tables` was written to. None: nobody counted.
    table_versions: NDArray[np.int64] | None = None
    adapters: NDArray[np.int32] | None = None  # [B]  slot of each sequence's adapter; -1: none
    # Of models with recurrent states; `states` says what they are. A sequence of which the step has
    # all tokens begins with a state of zeros.
    states: StateStep | None = None
    # [B]  slot of each sequence's audio, of models that read some; -1: it has none.
    audio_slots: NDArray[np.int32] | None = None
    # [T]  which of `inputs` stands for the token in place of its embedding; -1: none does. None:
    # of no token.
    input_rows: NDArray[np.int32] | None = None
    inputs: NDArray[np.float32] | None = None  # [I, hidden]
    # [T]  the position behind the last one that the token sees, if later ones are among them: those
    # of its picture, all in this step; 0: it sees none behind itself. None: no token does.
    seen_to: NDArray[np.int32] | None = None
    # [3, T]  where each token is in time, in lines and in columns, for ropes that turn by these.
    # None: all are where they stand in their sequence.
    rope_positions: NDArray[np.int32] | None = None

    @property
    def native_arrays(self) -> _NativeArrays:
        """What every run of a native program takes first, in its order."""
        return (
            self.token_ids, self.positions, self.slots, self.seq_starts, self.seq_lens, self.rows,
            self.block_tables, self.logit_rows,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLimits:
    """The largest step a backend must be ready for; it plans its memory once."""

    max_tokens: int
    max_seqs: int
    max_logit_rows: int
    max_model_len: int
    num_state_slots: int = 0  # of recurrent states


def draft_limits(limits: BackendLimits) -> BackendLimits:
    """Of a draft model's step: it sees each sequence's newest token beside those of the step."""
    return dataclasses.replace(
        limits, max_tokens=limits.max_tokens + limits.max_seqs, max_logit_rows=limits.max_seqs
    )


class Backend(Protocol):
    """A model in memory, ready to compute. Built by `backends.registry.build_backend`."""

    @property
    def name(self) -> str:
        """Such as "native/avx2"; for the log and `octavo doctor`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def cache_layout(self) -> CacheLayout:
        """What its layers remember, and which of them share block tables."""

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of one block: 16 tokens in the layers of one group."""

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        """Bytes of the device's own memory for KV: `fraction` of what is free beside the largest
        step. None where KV lies in the host's memory."""

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        """Plan memory for the largest step, allocate the KV cache. Called once, after loading."""

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        """Compute the step, then sample or score each row of logits. If the model sees, a step may
        have no tokens: then there is nothing to do but to copy."""

    def poison_blocks(self, block_ids: list[int]) -> None:
        """Fill blocks with NaN: tests show by it that freed memory is never read."""

    def close(self) -> None:
        """Let go of memory and threads; nothing may be called afterwards."""


class RankBackend(Backend, Protocol):
    """One of several ranks, or stages, of a model."""

    @property
    def config(self) -> ModelConfig: ...

    def follow(self, step: BackendStep) -> NDArray[np.float32] | None:
        """Compute the step as rank 0 does, which samples. Of a stage: its rows for the next one.
        Raises GatherFailed."""


class EndsGathers(Protocol):
    """What ranks show each other their columns by."""

    def fail(self) -> None:
        """End all that waits for the others. On any thread; a second call does nothing."""


class GathersSteps(RankBackend, Protocol):
    """A rank whose steps need all others to take part."""

    @property
    def ranks(self) -> EndsGathers: ...


class PendingSample(Protocol):
    """What a launched step samples, on its way."""

    def wait(self) -> Sampled:
        """Once the device is done with the step."""


@runtime_checkable
class LaunchesSteps(Protocol):
    """A backend that computes in the order of launches, while its caller goes on."""

    @property
    def launch_waits(self) -> bool:
        """Whether a launch waits for the device all the same: then it gains nothing."""

    def launch(self, step: BackendStep, sampling: SamplingBatch) -> PendingSample:
        """As `execute`, which is this and `wait`. All arrays may change afterwards."""


@runtime_checkable
class PreparesSteps(Protocol):
    """A backend that prepares each size of a step when it first meets it."""

    @property
    def step_was_usual(self) -> bool:
        """Whether the last step took what such steps take from then on: it was not the first of its
        size, or captured."""


@runtime_checkable
class PipelinesSteps(LaunchesSteps, Protocol):
    """A backend whose stages compute one step each at a time. A step must have all its tokens: it
    does not know what steps under way sample."""

    @property
    def num_stages(self) -> int: ...


@runtime_checkable
class HoldsStates(Protocol):
    """A backend that computes recurrent states."""

    def poison_states(self, slots: list[int]) -> None:
        """As `poison_blocks`, of slots."""


@runtime_checkable
class TakesAdapters(Protocol):
    """A backend with slots for LoRA adapters."""

    def pack_adapter(self, files: AdapterFiles) -> PackedAdapter:
        """In the form that a slot takes. In any thread, while steps are computed. Raises ModelError
        where it does not fit the model."""

    def set_adapter(self, slot: int, packed: PackedAdapter | None) -> None:
        """What the slot holds from the next step on; None: nothing."""


@runtime_checkable
class PreparesAdapters(Protocol):
    """A backend where a load is quicker with memory that was made ready before."""

    def prepare_adapter(self) -> None:
        """Make ready what packing another adapter like the last one needs. In any thread."""


@runtime_checkable
class ExpectsAdapters(Protocol):
    """A backend with memory of its own, to which adapters must be sent."""

    def expect_adapter(self, packed: PackedAdapter) -> None:
        """A request that wants it waits. Where there is a place beside the slots, begin to send it:
        the step that uses it need not wait then."""


@runtime_checkable
class DraftsTokens(Protocol):
    """A backend that can hold a draft model, whose layers have a place in the same blocks."""

    @property
    def has_draft(self) -> bool: ...

    def draft(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        """Compute the step in the draft model, and sample its logits. Steps may be as large as
        `draft_limits` says; their copies and adapters are not looked at."""


@runtime_checkable
class LaunchesDrafts(DraftsTokens, Protocol):
    """A backend whose draft passes may follow one another before their tokens are known."""

    def launch_draft(self, step: BackendStep, sampling: SamplingBatch) -> PendingSample:
        """As `draft`, which is this and `wait`. Tokens may be awaited from the pass before."""

    @property
    def drafts_are_usual(self) -> bool:
        """Whether the passes since the last look took what such passes take from then on: none was
        the first of its size, or captured. As of the two below."""


@runtime_checkable
class DraftsFromStates(Protocol):
    """A backend that can hold a head which drafts from hidden states, and has layers of its own in
    the same blocks."""

    @property
    def has_draft_head(self) -> bool: ...

    def token_states(self, tokens: NDArray[np.int32]) -> States:
        """Copies of what the last step left of some of its tokens: [tokens, columns]."""

    def draft_from(
        self,
        step: BackendStep,
        states: States,
        sampling: SamplingBatch,
        *,
        is_first: bool,
    ) -> tuple[Sampled, States]:
        """Compute a step of positions, each with the token behind it and a state: the model's in a
        first pass, else the head's. Sample its logits; returns the head's states of their rows,
        too. First passes may be as large as `draft_limits` says, others as there are sequences;
        copies and adapters are not looked at."""


@runtime_checkable
class LaunchesStateDrafts(DraftsFromStates, Protocol):
    """As `LaunchesDrafts`, of such a head; its states are the device's."""

    def launch_draft_from(
        self,
        step: BackendStep,
        states: States,
        sampling: SamplingBatch,
        *,
        is_first: bool,
    ) -> tuple[PendingSample, States]:
        """As `draft_from`, which is this and `wait`."""

    def join_states(self, states: Sequence[States]) -> States:
        """One behind the other, in a copy unless there is one."""

    def pick_states(self, states: States, places: Sequence[int]) -> States:
        """Some of them, in order."""

    @property
    def drafts_are_usual(self) -> bool: ...


@runtime_checkable
class DraftsByHeads(Protocol):
    """A backend that can hold heads, which draft from the hidden states of a step."""

    @property
    def num_heads(self) -> int:
        """0: it holds none."""

    def hidden_rows(self, logit_rows: NDArray[np.int32]) -> States:
        """Copies of what these rows of the last step's logits were made from: [rows, hidden]."""

    def draft_head(
        self,
        head: int,
        states: States,
        tokens: NDArray[np.int32],
        sampling: SamplingBatch,
    ) -> tuple[Sampled, States]:
        """Compute one head for up to MAX_SPECULATION states, each with the token that the one
        before drafted or the model sampled. Sample its logits; returns the states of the next head,
        too."""


@runtime_checkable
class LaunchesHeads(DraftsByHeads, Protocol):
    """As `LaunchesDrafts`, of heads; states are the device's."""

    def launch_head(
        self,
        head: int,
        states: States,
        tokens: NDArray[np.int32] | None,
        sampling: SamplingBatch,
    ) -> tuple[PendingSample, States]:
        """As `draft_head`, which is this and `wait`; without tokens they are those that the head
        before drew."""

    def pick_states(self, states: States, places: Sequence[int]) -> States:
        """Some of them, in order."""

    @property
    def drafts_are_usual(self) -> bool: ...


@runtime_checkable
class EncodesAudio(Protocol):
    """A backend with an encoder of audio. What it makes of a window stays in a slot until the slot
    gets another one."""

    @property
    def feature_shape(self) -> tuple[int, int] | None:
        """Rows and columns of a window's features; None: the model reads no audio."""

    @property
    def audio_slot_bytes(self) -> int:
        """What a slot takes of the host's memory; 0 without."""

    def prepare_audio(self, num_slots: int) -> None:
        """Room for so many windows. Called once, after `prepare`."""

    def encode_audio(
        self, slot: int, features: NDArray[np.float32], part: int, num_parts: int
    ) -> None:
        """One of the parts of the work, of equal size and in their order; the last one fills the
        slot. Parts of two windows are never mixed."""

    def align_by(self, heads: Sequence[tuple[int, int]]) -> None:
        """Layers and heads of the decoder, whose attention `audio_attention` gives. Called before
        `prepare`, or never."""

    def audio_attention(
        self, slot: int, tokens: NDArray[np.int32], num_rows: int
    ) -> NDArray[np.float32]:
        """Softmax weights over the first rows of a window, of tokens of the step that was computed
        last: [tokens, heads, num_rows]."""


@runtime_checkable
class MovesKV(Protocol):
    """A backend whose KV blocks can be taken out and put back, as bytes between two steps."""

    def save_blocks(self, block_ids: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Copies of all bytes of blocks, each `kv_bytes_per_block`. Their memory may be given back
        together."""

    def load_blocks(self, block_ids: Sequence[int], pages: Sequence[NDArray[np.uint8]]) -> None:
        """What `save_blocks` gave, into blocks of the same group of layers."""


@runtime_checkable
class MovesStates(Protocol):
    """Likewise for recurrent states: all layers' of a slot."""

    def save_states(self, slot: int) -> NDArray[np.uint8]:
        """A copy of all bytes, `cache_layout.state_bytes` of them."""

    def load_states(self, slot: int, page: NDArray[np.uint8]) -> None:
        """What `save_states` gave."""


class PageCopy(Protocol):
    """Blocks on their way out of the KV cache, or to it."""

    @property
    def is_done(self) -> bool: ...

    @property
    def is_failed(self) -> bool:
        """Known once it is done."""

    @property
    def seconds(self) -> float:
        """That the copy took beside its caller's work; known once it is done."""

    @property
    def pages(self) -> list[NDArray[np.uint8]]:
        """What was copied, once it is done: of blocks on their way in perhaps other arrays than
        were given, which are quicker the next time."""


class BlockCopies(Protocol):
    """Copies of KV blocks to the host's memory and back, which steps do not wait for. One thread
    calls it."""

    @property
    def latency_s(self) -> float: ...

    @property
    def bytes_per_s(self) -> float:
        """Into the cache, as far as is known before any load."""

    @property
    def num_saves_free(self) -> int:
        """Blocks that `begin_save` takes now."""

    @property
    def num_loads_free(self) -> int:
        """Blocks that `begin_load` takes now."""

    def begin_save(self, block_ids: Sequence[int]) -> PageCopy:
        """Blocks as all steps that were launched so far leave them; they may be overwritten by
        those that follow."""

    def begin_load(self, pages: Sequence[NDArray[np.uint8]]) -> PageCopy: ...

    def place(self, copy: PageCopy, block_ids: Sequence[int]) -> None:
        """What was loaded, into blocks as steps that are launched from now on find them; -1: that
        page is not wanted."""

    def drop(self, copy: PageCopy) -> None:
        """In place of `place`."""

    def close(self) -> None:
        """What is under way is lost."""


@runtime_checkable
class CopiesKV(MovesKV, Protocol):
    """A backend whose KV blocks are copied while it computes."""

    def open_copies(
        self, *, host_bytes: int, is_stored: bool, woken: Callable[[], None]
    ) -> BlockCopies:
        """With so many bytes of pinned pages to be kept; `is_stored`: others are held for a while
        because they are written or sent. `woken` is called on other threads when something is
        done. Raises ConfigError."""


@runtime_checkable
class NamesBuild(Protocol):
    """A backend whose bits depend on more than its name says."""

    def build_digest(self) -> bytes:
        """Of the kernels, and of the device that they run on."""


class CompileListener(Protocol):
    """Who must know that what looks like a hang is a compilation; a `Heartbeat`."""

    def compile_begins(self) -> None: ...
    def compile_ends(self) -> None: ...
