"""Builds a tokenizer from a SentencePiece model: unigram and BPE, as the library cuts text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo_engine.errors import ModelError
from octavo_engine.tokenization.scored_merges import merges_by_score
from octavo_engine.tokenization.sentencepiece_model import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORD,
)

if TYPE_CHECKING:
    from octavo_engine.tokenization.sentencepiece_model import SentencePieceModel

UNDERSCORE = "\u2581"


def sentencepiece_tokenizer(
    model: SentencePieceModel,
    where: str,
    *,
    adds_prefix: bool | None = None,
    prefix_each_part: bool = True,
) -> Tokenizer:
    """`adds_prefix` overrules the file's dummy prefix; with special tokens in a text, each part
    between them has one, or only the first. Raises ModelError."""
    if model.model_type not in (UNIGRAM, BPE):
        kind = "word" if model.model_type == WORD else "char"
        raise ModelError(f"{where} is a SentencePiece model of the type {kind}; supported are "
                         "unigram and bpe")  # fmt: skip
    if model.suffix_space or not model.escape_whitespaces:
        raise ModelError(f"{where} marks spaces in another way than by U+2581 before words")
    if any(piece.kind == UNUSED for piece in model.pieces):
        raise ModelError(f"{where} has unused pieces, which are not supported")
    texts = [piece.text for piece in model.pieces]
    if len(set(texts)) != len(texts):
        raise ModelError(f"{where} has a piece twice")
    symbols = [piece.text for piece in model.pieces if piece.kind == USER_DEFINED and piece.text]
    has_prefix = model.add_dummy_prefix if adds_prefix is None else adds_prefix
    try:
        tokenizer = Tokenizer(_unigram(model) if model.model_type == UNIGRAM else _bpe(model))
        steps = _cleaning(model)
        if has_prefix and prefix_each_part:
            steps.append(_prefix(symbols))
        steps.append(normalizers.Replace(" ", UNDERSCORE))
        tokenizer.normalizer = normalizers.Sequence(steps)
        if has_prefix and not prefix_each_part:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
                UNDERSCORE, prepend_scheme="first", split=False
            )
        decoding: list[Any] = [
            decoders.Replace(UNDERSCORE, " "), decoders.ByteFallback(), decoders.Fuse(),
        ]  # fmt: skip
        if has_prefix:
            decoding.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(decoding)
        tokenizer.add_tokens([
            AddedToken(piece.text, normalized=piece.kind == USER_DEFINED,
                       special=piece.kind != USER_DEFINED)
            for piece in model.pieces if piece.kind in (CONTROL, USER_DEFINED) and piece.text
        ])  # fmt: skip
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{where} has a broken vocabulary: {error}") from None
    return tokenizer


def _unigram(model: SentencePieceModel) -> Any:
    unknown = [i for i, piece in enumerate(model.pieces) if piece.kind == UNKNOWN]
    # Only normal pieces are found in text; the others have no score to compete with.
    worst = min(piece.score for piece in model.pieces) - 1000.0
    scored = [
        (piece.text, piece.score if piece.kind in (NORMAL, USER_DEFINED) else worst)
        for piece in model.pieces
    ]
    return models.Unigram(scored, unknown[0] if unknown else None, model.byte_fallback)


def _bpe(model: SentencePieceModel) -> Any:
    vocab = {piece.text: i for i, piece in enumerate(model.pieces)}
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == NORMAL}
    unknown = [piece.text for piece in model.pieces if piece.kind == UNKNOWN]
    return models.BPE(
        vocab=vocab,
        merges=merges_by_score({text: vocab[text] for text in scores}, scores),
        byte_fallback=model.byte_fallback and any(p.kind == BYTE for p in model.pieces),
        fuse_unk=True,
        unk_token=unknown[0] if unknown else None,
    )


def _cleaning(model: SentencePieceModel) -> list[Any]:
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""),
                  normalizers.Replace(Regex(" {2,}"), " ")]  # fmt: skip
    return steps


def _prefix(symbols: list[str]) -> Any:
    """The space before a text; symbols that users defined are put through the same steps, and
    must come out as they are."""
    if not symbols:
        return normalizers.Prepend(UNDERSCORE)
    any_symbol = "|".join(re.escape(text.replace(UNDERSCORE, " ")) for text in symbols)
    return normalizers.Replace(Regex(rf"\A(?=.)(?!(?:{any_symbol})\z)"), UNDERSCORE)
