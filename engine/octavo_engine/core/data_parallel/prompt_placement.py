"""Which core computes a request: the one that holds most of its prompt, unless others do less."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.protocol.prefix_hash import chain_digests, root_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo_engine.state.request import EngineRequest

# What a sequence at a core costs one that comes to it, in prompt tokens: both share each step.
SEQUENCE_TOKENS = 64
MAX_TOKENS = 32_768  # of a prompt that are looked at: they are hashed on the event loop


class CoreLoad(NamedTuple):
    """One core, as one request sees it."""

    rank: int
    num_sequences: int  # in flight there
    pending_tokens: int  # of their prompts, not computed yet
    held_tokens: int = 0  # of this request's prompt, that were computed there


def choose_core(loads: Iterable[CoreLoad]) -> int:
    """The rank where the least has to be done before the first token."""

    def cost(load: CoreLoad) -> tuple[int, int, int]:
        before = load.pending_tokens + SEQUENCE_TOKENS * load.num_sequences
        return before - load.held_tokens, load.num_sequences, load.rank

    return min(loads, key=cost).rank


def prompt_blocks(request: EngineRequest, prompt: Sequence[int]) -> list[bytes]:
    """Names of the full blocks that its prefill computes, the first ones of a long prompt; equal
    names are equal KV."""
    adapter = "" if request.adapter is None else request.adapter.digest
    salt = request.cache_salt
    if request.audio is not None:
        salt += request.audio.digest.hex()
    tokens = [*prompt[:MAX_TOKENS], *request.output_token_ids][:MAX_TOKENS]
    for span in request.media:  # placeholders are the same for all pictures
        word = int.from_bytes(span.digest[:4], "little")
        here = len(tokens[span.first : span.end])
        tokens[span.first : span.end] = [word] * here
    root = root_digest(b"", salt=salt, adapter=adapter)
    return chain_digests(root, tokens, block_size=BLOCK_SIZE)


class PromptRecord:
    """The prompts that were sent to a core, as far as its KV pool may still hold them: the last
    ones used, as many blocks as the pool has."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_held(self, blocks: Sequence[bytes]) -> int:
        """How many of them, from the first on, it was sent before."""
        for index, name in enumerate(blocks):
            if name not in self._blocks:
                return index
        return len(blocks)

    def note(self, blocks: Sequence[bytes]) -> None:
        for name in reversed(blocks):  # the first are the last to be forgotten
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
