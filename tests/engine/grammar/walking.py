"""Walks texts through grammars on a byte vocabulary, and draws random texts of a language."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher

from octavo_engine.grammar.check import check, compiler_source
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.vocabulary import Vocabulary
from octavo_engine.tokenization.bytes_tokenizer import EOS, ByteTokenizer

if TYPE_CHECKING:
    from octavo_engine.state.grammar import GrammarSpec


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary(ByteTokenizer(300), vocab_size=310)


def matcher(spec: GrammarSpec) -> LLMatcher:
    check(spec)
    source = compiler_source(spec, vocabulary().specials, DEFAULT_LIMITS)
    made = LLMatcher(
        vocabulary().compiler_tokenizer,
        source,
        limits=DEFAULT_LIMITS.parser_limits(),
        log_level=0,
    )
    assert not made.is_error(), made.get_error()
    return made


def accepts(spec: GrammarSpec, text: str) -> bool:
    walk = matcher(spec)
    ids = list(text.encode())
    return walk.try_consume_tokens(ids) == len(ids) and walk.is_accepting()


def begins(spec: GrammarSpec, text: str) -> bool:
    ids = list(text.encode())
    return matcher(spec).try_consume_tokens(ids) == len(ids)


def draw(spec: GrammarSpec, seed: int, *, max_bytes: int = 400) -> str | None:
    """A random text of the language; None if it did not come to an end."""
    rng = random.Random(seed)
    walk = matcher(spec)
    text = bytearray()
    for _ in range(max_bytes):
        bits = np.frombuffer(walk.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return text.decode()
        allowed = [token for token in allowed if token < 256]
        # Mostly what ends things: uniform bytes would go on for ever.
        closing = [token for token in allowed if token in b'"]}']
        token = rng.choice(closing if closing and rng.random() < 0.4 else allowed)
        assert walk.consume_token(token)
        text.append(token)
        if walk.is_stopped():
            return text.decode()
    return None
