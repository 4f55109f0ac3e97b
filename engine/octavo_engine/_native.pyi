"""The CPU extension (csrc). Every call that computes releases the GIL.

Matrices [rows = out features, cols = in features] are *packed* into panels of 16 rows: panel p
holds, for each pair of columns (2j, 2j + 1), its 16 rows' two values side by side (bf16), or for
each column its 16 rows' values (f32), or groups of 32 columns of integers with scales (q8, q4, and
nvfp4, and GGUF's types under their own names: q4_0, q5_0, q5_1, q2_k … q6_k, iq4_nl, iq4_xs,
mxfp4). Rows are padded to 16 and columns to 2, or to whole groups, with zeros. The KV cache uses
the same panels: 16 tokens of a block are 16 rows of K, and 16 columns of V are 16 rows.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def cpu_features() -> dict[str, bool]:
    """What this processor offers: avx2, fma, f16c, avx512f, avx512_bf16, avx512_vnni, amx_bf16,
    neon …"""

def crc32(data: Buffer, value: int = 0, /) -> int:
    """As zlib's, of an object with bytes, several times as fast where the processor helps."""

def available_isas() -> list[str]:
    """Instruction sets that were compiled in and can run here, best first: e.g. ["avx2",
    "generic"]."""

def runnable_isas() -> list[str]:
    """Instruction sets that this processor runs, compiled in or not, best first."""

def available_cores(cgroups: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int:
    """Cores this process may use: affinity and cgroup quota respected."""

class Team:
    """Worker threads that compute together; parked when idle. `isa` as OCTAVO_CPU_ISA or the
    best. `cpus`: which processors each worker may use; empty: any."""

    def __init__(
        self, num_threads: int, isa: str = "", cpus: Sequence[Sequence[int]] = ()
    ) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_barriers(self) -> int: ...

class Packed:
    """A weight matrix in panels, of one dtype; or of parts one below the other, (rows, dtype) each,
    which may be different integers if they start at multiples of 16 rows. ValueError else."""

    @overload
    def __init__(self, rows: int, cols: int, dtype: str) -> None: ...
    @overload
    def __init__(self, parts: Sequence[tuple[int, str]], cols: int) -> None: ...
    @overload
    def __init__(
        self,
        parts: Sequence[tuple[int, str]],
        cols: int,
        *,
        first_row: int,
        total_rows: int,
        of_halves: bool = False,
    ) -> None:
        """Some rows of a larger matrix: from `first_row` on, which is a multiple of 16; or so many
        from there on in each of its two halves."""
    @property
    def total_rows(self) -> int: ...
    @property
    def is_cut(self) -> bool: ...
    @property
    def of_halves(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def dtype(self) -> str:
        """Different parts' are joined by a plus."""
    @property
    def nbytes(self) -> int: ...
    def pack(
        self,
        team: Team,
        first_row: int,
        data: NDArray[np.uint8],
        source_dtype: str,
        num_rows: int,
        row_map: NDArray[np.int32] | None = None,
    ) -> None:
        """Pack `num_rows` stored rows behind one another, from `data`, as rows first_row ….

        `source_dtype` is F32, F16, BF16 or a GGUF type (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K …
        Q6_K, IQ4_NL, IQ4_XS, MXFP4). A GGUF type's own packing (q8 for Q8_0, q4 for Q4_1) takes
        over its codes and scales; f32 and bf16 take the values of any type, q8 and q4 quantise
        them. `row_map[i]` names the stored row that becomes row i. Raises ValueError when sizes do
        not agree, or the packing holds no such type.
        """
    def unpack(self) -> NDArray[np.float32]:
        """The matrix [rows, cols]; for tests."""

def dequantize(data: NDArray[np.uint8], source_dtype: str, num_values: int) -> NDArray[np.float32]:
    """Stored values as float32; source dtypes as in Packed.pack."""

class KVCache:
    """K and V of all layers in blocks of 16 tokens; dtype "f32", "bf16", "int8", "fp8_e4m3" or
    "fp8_e5m2". In 8 bits each token and head has a scale, in bf16.

    A layer is (group, region, KV heads, head_dim). A block belongs to one group at a time, and no
    two layers of a group share a region. `windows`: how many of a sequence's last tokens each
    group's blocks hold; 0: all. `latent_ranks`: of each layer's one head, how many columns of a key
    are its values, where there are no others; 0: there are."""

    def __init__(
        self,
        num_blocks: int,
        layers: Sequence[tuple[int, int, int, int]],
        windows: Sequence[int],
        dtype: str,
        latent_ranks: Sequence[int] = (),
    ) -> None: ...
    @property
    def bytes_per_block(self) -> int: ...
    def copy(self, copies: NDArray[np.int32]) -> None:
        """Rows (source block, target block, number of tokens), in all regions."""
    def poison(self, block_ids: list[int]) -> None: ...
    def save(self, block: int, page: NDArray[np.uint8]) -> None:
        """All bytes of a block into `page`, which has `bytes_per_block`."""
    def load(self, block: int, page: NDArray[np.uint8]) -> None:
        """The opposite."""
    def read(self, layer: int, block: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K and V of one block, each [num_kv_heads, 16, head_dim]; for tests."""

class StateCache:
    """Slots with the recurrent states of all layers that have one, in float32; `values` are how
    many each layer has."""

    def __init__(self, num_slots: int, values: Sequence[int]) -> None: ...
    @property
    def bytes_per_slot(self) -> int: ...
    def copy(self, copies: NDArray[np.int32]) -> None:
        """Rows (source slot, target slot)."""
    def save(self, slot: int, page: NDArray[np.uint8]) -> None:
        """All bytes of a slot into `page`, which has `bytes_per_slot`."""
    def load(self, slot: int, page: NDArray[np.uint8]) -> None:
        """The opposite."""
    def poison(self, slots: list[int]) -> None: ...

class Ranks:
    """Processes of one host that run the same program: memory and a barrier in `file`, which is
    memory too. A barrier that waits longer than `patience_s` has the slowest rank fail."""

    def __init__(
        self, rank: int, size: int, workers_per_rank: int, file: int, patience_s: float
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def failed(self) -> int:
        """The first rank that failed, or -1."""
    def barrier(self) -> bool:
        """False from when a rank has failed."""
    def fail(self, rank: int) -> None:
        """Ends all waiting, now and from then on."""
    def begin_step(self, number: int) -> None:
        """Of ranks with steps of their own: the others are to take that step too, from 1 on."""
    def await_step(self, number: int, timeout_s: float) -> bool:
        """Whether some rank has begun with it; waits for that so long at most."""
    def join(self) -> None:
        """This rank is there; once each."""
    @property
    def num_joined(self) -> int: ...

class Ring:
    """Messages from rank 0 to all other ranks, in order, through `file`, which is memory."""

    def __init__(self, rank: int, size: int, file: int, max_bytes: int) -> None: ...
    @property
    def slowest(self) -> int:
        """The rank that has read the least."""
    def put(self, message: bytes, patience_s: float) -> bool:
        """By rank 0. False: a rank has read nothing for so long that there is no room."""
    def take(self) -> bytes:
        """By the others; waits for the next one."""
    def take_within(self, patience_s: float) -> bytes | None:
        """None: none has come in that time."""

class PackedAdapter:
    """A LoRA adapter as the kernels want it, for slots with these sites."""

    def __init__(
        self,
        slots: AdapterSlots,
        added: Sequence[
            tuple[
                int,
                Sequence[
                    tuple[
                        int,
                        tuple[str, NDArray[np.uint8]],
                        tuple[str, NDArray[np.uint8]],
                        float,
                    ]
                ],
            ]
        ],
    ) -> None:
        """`added`: site, and what is added to its parts, ascending: (part, down, up, scale) for
        scale * up · (down · x), matrices as a dtype of a file (F32, F16, BF16) and the bytes of
        each row. Raises ValueError where shapes do not fit."""
    @property
    def nbytes(self) -> int: ...

class AdapterSlots:
    """The adapters that steps may use, in f32 or bf16, at the sites that were added."""

    def __init__(self, num_slots: int, max_rank: int, dtype: str) -> None: ...
    def add_site(self, sizes: list[int], cols: int, own: list[tuple[int, int]]) -> int:
        """A linear layer whose outputs are made of parts of these sizes, and from which on to which
        end this process has them: whole panels. Returns its number."""
    def shrunken_cols(self, site: int) -> int: ...
    def set(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Not while a program runs."""

    def prepare_spare(self, num_bytes: int) -> None:
        """Memory for the next adapter, with its pages; what is there may do."""

    @property
    def spare_bytes(self) -> int: ...

class Program:
    """Instructions over buffers in one arena, run as a whole.

    A buffer is (byte offset in the arena, columns, dtype "f32" | "bf16", rows "T" | "S"). Python
    decides where buffers lie and what is fused; csrc only runs. Instructions run in the order
    they were added.
    """

    def __init__(
        self,
        team: Team,
        arena_bytes: int,
        max_tokens: int,
        max_logit_rows: int,
        activation_bits: int = 16,
        ranks: Ranks | None = None,
        peers: Ranks | None = None,
        joins_phases: bool = True,
    ) -> None:
        """Activations are rounded to 16 or 8 bits where they meet integer weights. With `ranks`,
        all of them have the same program over one arena, and run each step together. With `peers`
        each runs steps of its own at the same time, and has some experts for the tokens of all.
        `joins_phases`: workers wait for each other only where they must; the bits are the same."""
    def buffer(self, offset: int, cols: int, dtype: str, rows: str) -> int:
        """Declare a buffer; returns its number. Offsets are multiples of 64."""
    def embed(
        self, dst: int, table: Packed, scale: float, of: str = "tokens", offset: int = 0
    ) -> None:
        """dst = table[ids + offset] * scale, where ids are the step's "tokens", "positions" or
        "types". dst is f32, rows T."""
    def input(self, dst: int, first: int = 0, is_sparse: bool = False) -> None:
        """dst = columns of the step's `inputs[input_rows]` from `first` on, which all rows then
        have; sparse: zeros where a row has none. dst is f32, rows T."""
    def rms_norm(
        self,
        dst: int,
        src: int,
        weight: NDArray[np.float32],
        eps: float,
        add: int = -1,
        add_scale: float = 1.0,
    ) -> None:
        """If add >= 0 first src += add_scale * add, in place. dst = norm(src) * weight, rounded
        to dst's dtype."""
    def layer_norm(
        self,
        dst: int,
        src: int,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
        eps: float,
        add: int = -1,
        add_scale: float = 1.0,
    ) -> None:
        """As rms_norm, but the mean is taken away first and the bias added last."""
    def linear(
        self,
        dst: int,
        src: int,
        weight: Packed,
        bias: NDArray[np.float32] | None = None,
        mode: str = "store",
        activation: str = "",
        scale: float = 1.0,
        adapters: AdapterSlots | None = None,
        site: int = 0,
        u: int = -1,
    ) -> None:
        """mode "store": dst = y, or activation(y); "add": dst += scale * y; "glu": dst =
        activation(y left) * y right, where left and right are the two halves of weight's rows.
        y = src · weightᵀ + bias, and between the two what adapters add at `site`; u is a buffer of
        shrunken_cols(site) columns that they use meanwhile.
        src has the dtype of the weight, or is f32 for integers, which bring it to 15-bit ones;
        dst is f32, or with an activation f32 | bf16."""
    def attention(
        self,
        dst: int,
        qkv: int,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        rotary_dim: int = 0,
        cos_sin: NDArray[np.float32] | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        q_norm: NDArray[np.float32] | None = None,
        k_norm: NDArray[np.float32] | None = None,
        norm_eps: float = 1e-6,
        norm: str = "rms",
        norm_after_rope: bool = False,
        alibi: NDArray[np.float32] | None = None,
        is_causal: bool = True,
        is_whole: bool = False,
        group: int = 0,
        own_heads: tuple[int, int, int, int] | None = None,
        sinks: NDArray[np.float32] | None = None,
        is_chunked: bool = False,
        query_scales: NDArray[np.float32] | None = None,
        rope_sections: tuple[int, int, int] | None = None,
        is_segmented: bool = False,
        rope_interleaved: bool = False,
    ) -> None:
        """Per-head norms, rope, KV write, then paged causal attention. With is_whole each sequence
        is in the step from its first token on, and may see its later tokens too.
        cos_sin is [max positions, rotary_dim]: cos of each pair, then sin of each pair.
        own_heads: the first head that is computed here and how many, then the same of KV heads."""
    def glu(self, dst: int, src: int, activation: str) -> None: ...
    def activation(self, dst: int, src: int, activation: str) -> None: ...
    def add(self, dst: int, x: int, y: int, scale: float = 1.0) -> None:
        """dst = x + scale * y; dst may be x."""
    def scale(self, dst: int, src: int, factor: float) -> None: ...
    def soft_cap(self, dst: int, src: int, cap: float) -> None: ...
    def clamp(self, dst: int, src: int, limit: float) -> None: ...
    def gate(self, dst: int, src: int, scores: int) -> None:
        """dst = src * sigmoid(scores), which has one column; dst may be src."""
    def convert(self, dst: int, src: int) -> None:
        """Copy with rounding to dst's dtype."""
    def select_rows(self, dst: int, src: int) -> None:
        """dst (rows S) = src (rows T) at logit_rows."""
    def latent_attention(
        self,
        dst: int,
        q: int,
        kv: int,
        nope: int,
        mixed: int,
        key_up: tuple[Packed, ...],
        value_up: tuple[Packed, ...],
        *,
        layer: int,
        num_heads: int,
        first_head: int,
        rank: int,
        scale: float,
        cos_sin: NDArray[np.float32],
        turns_neighbours: bool,
        kv_norm: NDArray[np.float32],
        norm_eps: float,
        window: int,
        group: int,
    ) -> None:
        """Attention over latent vectors, [rank | what turns] columns of kv, which all heads share.
        Queries, [nope | what turns] columns of q a head, meet them by key_up, [rank, nope] a head;
        sums become dst by value_up, [value_dim, rank] a head. Weights are of the heads from
        first_head on; nope and mixed are room for each head's columns as weights take them."""
    def moe(
        self,
        dst: int,
        src: int,
        scores: int,
        gathered: int,
        hidden: int,
        results: int,
        gate_up: tuple[Packed, ...],
        down: tuple[Packed, ...],
        top_k: int,
        renormalise: bool,
        activation: str,
        is_sigmoid: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        best_of_group: int = 1,
        scale: float = 1.0,
        routing_bias: NDArray[np.float32] | None = None,
        gate_up_bias: NDArray[np.float32] | None = None,
        down_bias: NDArray[np.float32] | None = None,
        weighs_inputs: bool = False,
        first_slot: int = 0,
        num_slots: int | None = None,
        num_experts: int | None = None,
    ) -> None:
        """dst = the sum over each row's top_k experts by scores (one column an expert) of weight *
        down(activation(left half) * right half of gate_up(src)). With weighs_inputs it is src that
        is multiplied by the weight.

        gathered, hidden and results are room for a row for each expert of each row: top_k times the
        columns of src, of an expert's width, and of dst.

        A rank may have some slots in a row, from `first_slot` on, of `num_slots` that all ranks
        have together. At first they have `num_experts` in their order, and then the first of these
        again; see move_experts."""
    def run_empty(self) -> None:
        """With peers: this rank's experts' part of a step in which it has no tokens. Raises
        RuntimeError where a rank has failed."""
    def expert_tokens(self) -> list[list[int]]:
        """Of each mixture, how many rows each expert was chosen for so far, on any rank."""
    def slot_tokens(self) -> list[list[int]]:
        """Of each mixture, how many rows were computed in each slot so far, on any rank."""
    def move_experts(self, layouts: list[list[int]]) -> None:
        """From now on the slots of each mixture have these experts. All ranks or peers call it
        between the same steps. Raises ValueError where an expert has no slot, and RuntimeError
        where a rank has failed."""
    def columns(self, dst: int, src: int, first: int) -> None:
        """dst = src's columns from `first` on, as many as dst has."""
    def join(self, dst: int, x: int, y: int) -> None:
        """dst = x's columns, then y's."""
    def multiply(self, dst: int, x: int, y: int, activation: str = "") -> None:
        """dst = x * activation(y); dst may be x."""
    def group_norm(
        self, dst: int, src: int, weight: NDArray[np.float32], eps: float, size: int
    ) -> None:
        """As rms_norm, of each `size` columns; the weight has one value a column, or `size`."""
    def mix(self, dst: int, src: int, weights: int, inputs: int, offset: float = 0.0) -> None:
        """Of `inputs` streams in src's columns, side by side, each stream of dst is the sum by
        (weights + offset), of which each row brings [streams of dst, streams of src]."""
    def match_rms(self, dst: int, src: int, like: int, floor: float) -> None:
        """dst = src scaled to the root mean square of like's row; src's mean square counts as at
        least `floor`. dst may be src."""
    def sparsify(self, dst: int, src: int, deviations: float) -> None:
        """dst = how far src is above mean + deviations * standard deviation of its row, or 0; dst
        may be src."""
    def scale_columns(self, dst: int, src: int, factors: NDArray[np.float32]) -> None:
        """dst = src * factors, of which there is one for each column; dst may be src."""
    def short_conv(
        self,
        dst: int,
        src: int,
        layer: int,
        kernel: int,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None = None,
        activation: str = "",
    ) -> None:
        """dst = activation(bias + the sum of weight * the last inputs); weight is [kernel, columns]
        in one row. `layer` is of those with a state, which begins with kernel - 1 inputs."""
    def ssd_scan(
        self,
        dst: int,
        xbc: int,
        dt: int,
        layer: int,
        offset: int,
        sizes: tuple[int, int, int, int],
        a: NDArray[np.float32],
        d: NDArray[np.float32],
        dt_bias: NDArray[np.float32],
        dt_min: float,
        dt_max: float,
    ) -> None:
        """The scan of Mamba 2; sizes: heads, head_dim, groups, state_size. Its state is [heads,
        state_size, head_dim], `offset` values into the layer's. `a` is below zero."""
    def delta_rule(
        self,
        dst: int,
        qkv: int,
        gates: int,
        layer: int,
        offset: int,
        sizes: tuple[int, int, int, int],
        a: NDArray[np.float32],
        dt_bias: NDArray[np.float32],
    ) -> None:
        """The gated delta rule; sizes: key heads, value heads, key_dim, value_dim. Its state is
        [value heads, key_dim, value_dim]. gates are [beta | dt] of the value heads."""
    def selective_scan(
        self,
        dst: int,
        sources: tuple[int, int, int, int],
        layer: int,
        offset: int,
        state_size: int,
        a: NDArray[np.float32],
        d: NDArray[np.float32],
        dt_bias: NDArray[np.float32],
    ) -> None:
        """The scan of Mamba 1; sources: x, dt, B, C. Its state is [state_size, columns], `offset`
        values into the layer's, and so is `a` in one row, below zero."""
    def pool(self, dst: int, src: int, kind: str) -> None:
        """dst (rows S) = one row for each sequence from all of its rows in src (rows T): "mean",
        "max", "mean_sqrt_len" or "weightedmean"."""
    def cross_attention(
        self,
        dst: int,
        q: int,
        layer: int,
        num_heads: int,
        head_dim: int,
        length: int,
        scale: float,
    ) -> None:
        """Attention of rows of q, [q heads], over the `length` keys and values in each sequence's
        slot of the cross cache."""
    def store_cross(self, src: int, layer: int, num_heads: int, head_dim: int, length: int) -> None:
        """Rows of src, [k heads | v heads], go to their sequence's slot of the cross cache."""
    def features(self, dst: int) -> None:
        """dst = the step's features."""
    def shift_rows(self, dst: int, src: int) -> None:
        """Each row of dst is the one before it of its sequence in src, the first one zeros."""
    @property
    def num_instructions(self) -> int:
        """As `run` counts them, of which some stand for no call."""
    def run(
        self,
        kv: KVCache,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int32],
        seq_starts: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        rows: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        type_ids: NDArray[np.int32] | None = None,
        op_times: NDArray[np.int64] | None = None,
        adapters: NDArray[np.int32] | None = None,
        cross: KVCache | None = None,
        cross_slots: NDArray[np.int32] | None = None,
        features: NDArray[np.float32] | None = None,
        first_instruction: int = 0,
        end_instruction: int = -1,
        input_rows: NDArray[np.int32] | None = None,
        inputs: NDArray[np.float32] | None = None,
        seen_to: NDArray[np.int32] | None = None,
        rope_positions: NDArray[np.int32] | None = None,
        segment_starts: NDArray[np.int32] | None = None,
        states: StateCache | None = None,
        state_slots: NDArray[np.int32] | None = None,
        state_saves: NDArray[np.int32] | None = None,
    ) -> None:
        """Run a step. Raises ValueError when the arrays do not agree or exceed the plan.

        `slots` is [groups, tokens], `block_tables` [groups, rows, blocks]. Entries of a table that
        no token of the step sees through its group's window may be anything.

        `op_times`, one longer than there are instructions, takes when the step began and when each
        was done, by time.perf_counter_ns; one that had no rows is 0.

        `cross_slots` has each sequence's slot in the `cross` cache. With some of the instructions
        only, the next call with the same step goes on with the others."""
    def read(self, buffer: int, num_rows: int) -> NDArray[np.float32]:
        """A view (f32) or copy (bf16) of the first rows of a buffer, e.g. the logits after
        `run`."""

def sample(
    team: Team,
    logits: NDArray[np.float32],
    table: NDArray[Any],
    rows: NDArray[np.int32],
    positions: NDArray[np.int32],
    targets: NDArray[np.int32],
    history: NDArray[np.int32],
    bias_starts: NDArray[np.int32] | None,
    bias_ids: NDArray[np.int32] | None,
    bias_values: NDArray[np.float32] | None,
    allow_starts: NDArray[np.int32] | None,
    allow_ids: NDArray[np.int32] | None,
    mask_rows: NDArray[np.int32] | None,
    mask_bits: NDArray[np.uint32] | None,
    chosen_starts: NDArray[np.int32] | None,
    chosen_ids: NDArray[np.int32] | None,
    num_logprobs: int,
    tokens: NDArray[np.int32],
    status: NDArray[np.uint8],
    logprobs: NDArray[np.float32] | None,
    ranks: NDArray[np.int32] | None,
    top_ids: NDArray[np.int32] | None,
    top_logprobs: NDArray[np.float32] | None,
) -> None:
    """Sample or score every row of logits [S, V] (modified in place); see
    octavo_engine.sampling.batch."""

def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    """Four 32-bit random numbers of Philox-4x32-10; for tests."""
