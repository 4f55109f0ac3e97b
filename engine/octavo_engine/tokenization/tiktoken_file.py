"""Builds a tokenizer from a tiktoken file: lines of a token in base64 and its rank, which is its id
and the order in which pairs merge."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo_engine.errors import ModelError
from octavo_engine.tokenization.gguf_vocabulary import GPT4O, KIMI, LLAMA3, QWEN2
from octavo_engine.tokenization.token_pieces import byte_of_character

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d{1,9})")
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
)


class _Encoding(NamedTuple):
    """What the file does not say: how text is cut, and the tokens that follow the ranked ones."""

    regex: str | None  # None: GPT-2's own
    nfc: bool = False
    special: tuple[str, ...] = ()


_QWEN = _Encoding(
    QWEN2,
    nfc=True,
    special=(
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)),
    ),
)  # fmt: skip
# By the file's name, else by tokenizer_config.json's class.
_BY_NAME = {
    "qwen.tiktoken": _QWEN,
    "tiktoken.model": _Encoding(KIMI),
    "o200k_base.tiktoken": _Encoding(GPT4O),
    "cl100k_base.tiktoken": _Encoding(_CL100K),
    "r50k_base.tiktoken": _Encoding(None),
    "p50k_base.tiktoken": _Encoding(None),
    "tokenizer.model": _Encoding(LLAMA3),  # Llama 3's own files
}
_BY_CLASS = {"QWenTokenizer": _QWEN, "TikTokenTokenizer": _Encoding(KIMI)}


def is_tiktoken(data: bytes) -> bool:
    """Whether the first line is a token and its rank."""
    return _LINE.fullmatch(data[:4096].partition(b"\n")[0].rstrip(b"\r")) is not None


def tiktoken_tokenizer(data: bytes, file: Path, own_class: str) -> Tokenizer:
    """Raises ModelError that names the file."""
    encoding = _BY_CLASS.get(own_class) or _BY_NAME.get(file.name)
    if encoding is None:
        raise ModelError(
            f"{file}: how this tiktoken file cuts text is not known by its name; known are "
            f"{', '.join(_BY_NAME)}"
        )
    ranks = _ranks(data, str(file))
    tokenizer = tokenizer_of_ranks(ranks, encoding.regex, where=str(file))
    if encoding.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False)
                          for text in encoding.special])  # fmt: skip
    return tokenizer


def tokenizer_of_ranks(ranks: dict[bytes, int], regex: str | None, *, where: str) -> Tokenizer:
    """A word that is a token is one; in others the pair with the lowest rank merges first."""
    letter = {byte: character for character, byte in byte_of_character().items()}
    vocab = {"".join(map(letter.__getitem__, token)): rank for token, rank in ranks.items()}
    if len(set(vocab.values())) != len(vocab):
        raise ModelError(f"{where} gives two tokens the same rank")
    missing = [byte for byte in range(256) if letter[byte] not in vocab]
    if missing:
        raise ModelError(f"{where} has no token for the byte {missing[0]}")
    merges = [
        (text[:cut], text[cut:])
        for text, _ in sorted(vocab.items(), key=lambda item: item[1])
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{where} has a broken vocabulary: {error}") from None
    steps: list[Any] = []
    if regex is not None:
        steps.append(pre_tokenizers.Split(Regex(regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for token, rank in _lines(data, where):
        if token in ranks:
            raise ModelError(f"{where} has the token {token!r:.40} twice")
        ranks[token] = rank
    return ranks


def _lines(data: bytes, where: str) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        try:
            if match is None:
                raise binascii.Error
            yield base64.b64decode(match[1], validate=True), int(match[2])
        except binascii.Error:
            raise ModelError(f"{where}, line {number}: not a token in base64 and a rank") from None
