"""Tokenizers from tokenizer.model files, against the SentencePiece library that wrote them."""

from __future__ import annotations

import functools
import io
import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece

from octavo_engine.errors import ModelError
from octavo_engine.tokenization.load import load_tokenizer
from octavo_engine.tokenization.sentencepiece_model import parse_model
from octavo_engine.tokenization.sentencepiece_tokenizer import sentencepiece_tokenizer
from octavo_engine.weights.source import ModelFiles

if TYPE_CHECKING:
    from pathlib import Path

LINE = (
    "the of and to a in is it you that he was for on are with as his they be at one have this "
    "from or had by hot word but what some we can out other were all there when up use your how "
    "said an each she which do their time if will way about many then them write would like so "
    "naïve Straße façade 東京 日本語 Привет мир ١٢٣ 42 1984 x=y+1 don't e.g. foo_bar() <tag/> "
    "👋🏽 ﬁ ①"
)
WORDS = LINE.split()
SYMBOLS = ["<sep>", "<sep>>", "$$"]
FORMS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "unigram-bytes-symbols": {
        "model_type": "unigram", "byte_fallback": True, "user_defined_symbols": SYMBOLS,
    },
    "unigram-as-it-is": {
        "model_type": "unigram", "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "byte_fallback": True,
    },
    "unigram-no-prefix": {"model_type": "unigram", "add_dummy_prefix": False},
    "unigram-folded": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
    "bpe": {"model_type": "bpe"},
    "bpe-llama": {
        "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "split_digits": True,
        "allow_whitespace_only_pieces": True,
    },
    "bpe-symbols": {
        "model_type": "bpe", "byte_fallback": True, "user_defined_symbols": SYMBOLS,
        "add_dummy_prefix": False,
    },
}  # fmt: skip
TEXTS = [
    "", " ", "   ", "a", " a", "a ", "the  time", "\tthe\ntime\r\n", "naïve façade", "ẞ Straße",
    "日本語東京", "\u2581the", "unknown ☃☃☃ snow", "👋🏽👋", "a\u0000b",
    "\uff46\uff55\uff4c\uff4c ﬁ ①", "…", "e\u0301",
    "\u200bzero", "don't  do   that ",
]  # fmt: skip
# Not "$$$" (where symbols overlap, a unigram model of the library may take the later one) and not
# "$$": a text that is a symbol and nothing else has no space before it here.
SYMBOL_TEXTS = [
    "<sep>the",
    "the<sep>time",
    "a <sep> b",
    "<sep>><sep>",
    "z$$",
    "x$$ y",
    "<sep",
    "a<sep>",
]


@functools.cache
def trained(name: str) -> bytes:
    rng = random.Random(1)
    lines = [" ".join(rng.choices(WORDS, k=9)) for _ in range(400)]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, num_threads=1, minloglevel=2,
        **{"vocab_size": 420, "hard_vocab_limit": False, "character_coverage": 0.98}
        | FORMS[name],
    )  # fmt: skip
    return out.getvalue()


def random_texts(count: int) -> list[str]:
    rng = random.Random(2)
    letters = [*"abcdetho ", *"  .,'1é日ß☃👋\n\t", "the", " of", "<sep>", "$", "ﬁ", "\u0301"]
    return ["".join(rng.choices(letters, k=rng.randrange(1, 40))) for _ in range(count)]


@pytest.mark.parametrize("name", FORMS)
def test_ids_are_those_of_the_library(name: str) -> None:
    data = trained(name)
    truth = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = sentencepiece_tokenizer(parse_model(data, "m"), "m")
    texts = [*TEXTS, *random_texts(400)]
    if "symbols" in name:
        texts += SYMBOL_TEXTS
    if FORMS[name].get("normalization_rule_name") != "identity":
        # A known limit of the `tokenizers` package: a letter that is replaced loses its accent.
        texts = [text for text in texts if not re.search("[^a-z]\u0301", text)]
    assert len(texts) > 250
    for text in texts:
        assert ours.encode(text, add_special_tokens=False).ids == truth.encode(text), repr(text)


@pytest.mark.parametrize("name", FORMS)
def test_the_parser_reads_what_the_library_reads(name: str) -> None:
    truth = sentencepiece.SentencePieceProcessor(model_proto=trained(name))
    model = parse_model(trained(name), "m")
    assert len(model.pieces) == truth.get_piece_size()
    for i, piece in enumerate(model.pieces):
        assert piece.text == truth.id_to_piece(i)
        assert piece.score == pytest.approx(truth.get_score(i))
        assert (piece.kind == 3) == truth.is_control(i)
        assert (piece.kind == 6) == truth.is_byte(i)


def write(folder: Path, name: str, **config: Any) -> ModelFiles:
    (folder / "tokenizer.model").write_bytes(trained(name))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFiles("m", folder, "safetensors", {}, {})


LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}


def test_a_folder_with_tokenizer_model_alone_has_a_tokenizer(tmp_path: Path) -> None:
    more = {
        "added_tokens_decoder": {
            "1": {"content": "<s>", "special": True},
            "421": {"content": "<|im_start|>", "special": True},
            "420": {"content": "<|tool|>", "special": False},
        },
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    truth = sentencepiece.SentencePieceProcessor(model_proto=trained("bpe-llama"))
    more["added_tokens_decoder"] = {
        str(truth.get_piece_size() + i): {"content": text, "special": special}
        for i, (text, special) in enumerate((("<|tool|>", False), ("<|im_start|>", True)))
    }
    tokenizer = load_tokenizer(write(tmp_path, "bpe-llama", **LLAMA, **more))
    ids = tokenizer.encode("the  naïve ☃ time")
    assert ids == [truth.bos_id(), *truth.encode("the  naïve ☃ time")]
    assert tokenizer.decode(ids) == "the  naïve ☃ time"
    assert tokenizer.bos_token_id == truth.bos_id()
    assert list(tokenizer.eos_token_ids) == [truth.eos_id()]
    size = truth.get_piece_size()
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False) == [size + 1]
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("legacy", [True, False])
def test_parts_between_special_tokens_begin_as_the_config_says(
    tmp_path: Path, legacy: bool
) -> None:
    files = write(tmp_path, "bpe-llama", **LLAMA, legacy=legacy, add_bos_token=False)
    truth = sentencepiece.SentencePieceProcessor(model_proto=trained("bpe-llama"))
    ids = load_tokenizer(files).encode("the</s>time")
    cut = ids.index(truth.eos_id())
    assert ids[:cut] == truth.encode("the")
    second = truth.encode("time") if legacy else truth.encode("the" + "time")
    assert (ids[cut + 1 :] == truth.encode("time")) is legacy, second


def test_a_class_that_renumbers_pieces_is_refused_by_name(tmp_path: Path) -> None:
    files = write(tmp_path, "unigram", tokenizer_class="XLMRobertaTokenizer")
    with pytest.raises(ModelError, match="XLMRobertaTokenizer numbers pieces in its own way"):
        load_tokenizer(files)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"model_type": "word", "vocab_size": 40}, "of the type word"),
     ({"model_type": "char"}, "of the type char"),
     ({"model_type": "unigram", "treat_whitespace_as_suffix": True}, "marks spaces in another")],
)  # fmt: skip
def test_other_forms_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 30), model_writer=out, minloglevel=2,
        **{"vocab_size": 130, "hard_vocab_limit": False} | options,
    )  # fmt: skip
    with pytest.raises(ModelError, match=message):
        sentencepiece_tokenizer(parse_model(out.getvalue(), "m"), "m")


def test_broken_files_are_model_errors() -> None:
    """Cut, with bits turned, and made up: an error of ours or a tokenizer, never a crash."""
    data = trained("unigram-bytes-symbols")
    rng = random.Random(5)
    outcomes = set()
    for attempt in range(300):
        broken = bytearray(data[: rng.randrange(len(data))] if attempt % 3 == 0 else data)
        for _ in range(rng.randrange(1, 30)):
            if broken:
                broken[rng.randrange(len(broken))] = rng.randrange(256)
        if attempt % 3 == 1:
            broken = bytearray(rng.randbytes(rng.randrange(200)))
        try:
            model = parse_model(bytes(broken), "m")
            if attempt % 10 == 2:
                sentencepiece_tokenizer(model, "m").encode("the time ☃")
            outcomes.add("read")
        except ModelError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
    with pytest.raises(ModelError, match="m is not a SentencePiece model: it has no pieces"):
        parse_model(b"", "m")
    with pytest.raises(ModelError, match="more than ten bytes"):
        parse_model(b"\xff" * 20, "m")
