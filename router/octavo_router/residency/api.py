"""What the router's hot path offers, natively or in Python: the shapes both forms share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from octavo_router.errors import RouterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint

# What a path expects in its body: decides which fields `scan` reads and what it makes keys of.
CHAT: Final = 0
COMPLETION: Final = 1
OTHER: Final = 2  # only what all bodies share; no keys
MESSAGES: Final = 3
RESPONSES: Final = 4

# Fields of a body by which a client would choose hosts, blocks of a KV cache or ranks. Or that may
# hold such fields: see proxy.privileged.
PRIVILEGED: Final = frozenset(
    (
        "kv_transfer_params", "ec_transfer_params", "data_parallel_rank", "routed_dp_rank",
        "disagg_prefill_dp_rank", "sampling_params", "vllm_xargs",
    )
)  # fmt: skip
PRIVILEGED_PREFIX: Final = "bootstrap_"  # SGLang's

MAX_DEPTH = 32  # objects and lists inside one another
MAX_NUMBER_BYTES = 4300  # what Python, and so an engine, converts
MAX_BODY_BYTES = 2**31 - 1

MAX_KEYS_PER_SLOT = 2_000_000
MAX_ASSUMED_KEYS_PER_SLOT = 65_536  # about a million tokens, what a plain server may hold


class ScanError(RouterError):
    """A body that is no strict JSON object: 400 for the client, with the place."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message  # a sentence that names the place
        self.offset = offset  # in bytes


class Scan(Protocol):
    """What the router needs of a body. Fields of the wrong type count as absent: engines tell."""

    @property
    def model(self) -> str: ...  # "" where absent
    @property
    def model_start(self) -> int: ...  # body[start:end] is the name with its quotes; 0, 0: absent
    @property
    def model_end(self) -> int: ...
    @property
    def stream(self) -> bool: ...
    @property
    def include_usage(self) -> bool: ...
    @property
    def max_tokens(self) -> int: ...  # 0 where absent
    @property
    def num_answers(self) -> int: ...  # `n`, of each prompt
    @property
    def num_prompts(self) -> int: ...  # 0 where there is none
    @property
    def priority(self) -> int: ...
    @property
    def user(self) -> str: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def session(self) -> str: ...  # session_id, session_params.session_id or prompt_cache_key
    @property
    def prompt_bytes(self) -> int: ...  # of all prompts, with tools and documents
    @property
    def num_prompt_ids(self) -> int: ...  # exact number of prompt tokens given as ids
    @property
    def keys(self) -> bytes: ...  # route_keys.lookup_keys, packed
    @property
    def is_privileged(self) -> bool: ...  # it has fields of PRIVILEGED


class ScanFunction(Protocol):
    def __call__(self, body: bytes, kind: int, adapters: dict[str, str] | None = None, /) -> Scan:
        """Reads a body once. `adapters` maps model names to the contents of adapters.

        Raises ScanError.
        """


class ResidencyIndex(Protocol):
    """Which prefixes each engine holds. Slots are engines; their numbers are used again.

    Belongs to one thread. A native index keeps 64 bits of each key's hash and number of tokens,
    so that about one in 10^9 looks at an absent key finds another; since `match` counts a key only
    when the one before it is there too, an answer is too long once in 10^18 at most.
    """

    def add_slot(self) -> int: ...
    def drop_slot(self, slot: int, /) -> None: ...
    def apply(self, slot: int, stored: bytes, evicted: bytes, /) -> None:
        """Evicts, then stores: packed as protocol.stream says.

        A full slot refuses new keys (num_refused): old ones end nearer to the prompt's beginning,
        so that predictions fall short but are never wrong.
        """

    def clear(self, slot: int, /) -> None: ...
    def assume(self, slot: int, keys: bytes, tokens_per_key: float, /) -> None:
        """What a plain server that was sent this prompt now holds, as far as can be known.

        Of what was assumed, each slot keeps between half of the limit and all of it: the latest.
        """

    def match(self, keys: bytes, slots: Sequence[int], /) -> list[int]:
        """The number of tokens of the longest prefix that each slot holds.

        Where keys held are a prefix of the chain, this is the deepest one's, the first key's
        absence notwithstanding; a gap further on may hide what lies behind it.
        """

    def num_keys(self, slot: int, /) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def num_refused(self) -> int: ...  # keys that a full slot did not take, ever


class MakeIndex(Protocol):
    def __call__(
        self,
        *,
        max_keys_per_slot: int = MAX_KEYS_PER_SLOT,
        max_assumed_keys_per_slot: int = MAX_ASSUMED_KEYS_PER_SLOT,
    ) -> ResidencyIndex: ...


class Underway(Protocol):
    """Prompts that are requested right now, by their names; see residency.underway."""

    @property
    def num_computing(self) -> int: ...
    def begin(self, names: Sequence[bytes], /) -> None: ...
    def end(self, names: Sequence[bytes], /) -> None: ...
    def compute(self, names: Sequence[bytes], keys: bytes, endpoint: Endpoint, /) -> None: ...
    def computed(self, names: Sequence[bytes], endpoint: Endpoint, /) -> None: ...
    def sharers(self, name: bytes, /) -> int: ...
    def credit(
        self,
        names: Sequence[bytes],
        keys: bytes,
        endpoints: Sequence[Endpoint],
        matched: list[int],
        tokens_per_key: float,
        /,
    ) -> None: ...


class MakeUnderway(Protocol):
    def __call__(self) -> Underway: ...


TokenLine = tuple[int, list[int]]  # which answer, its new token ids


class SplitTokenLines(Protocol):
    def __call__(self, data: bytes, /) -> tuple[bytes, list[TokenLine], bytes | None]:
        """Whole events without their internal lines, the lines' tokens, and the JSON of `begin`.

        Raises ValueError for a line of ours that cannot be read.
        """


class FindUsage(Protocol):
    def __call__(self, answer: bytes, /) -> tuple[int, int, int | None]:
        """Prompt, output and cached tokens by the answer's last usage object; see usage.Usage."""


class FindEventEnd(Protocol):
    def __call__(self, buffer: bytes | bytearray, start: int = 0, /) -> int:
        """Behind the last complete event at or after `start`, where one begins; else `start`."""
