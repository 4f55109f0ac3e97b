"""Tokenizers from tiktoken files, against the tiktoken library."""

from __future__ import annotations

import base64
import functools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import tiktoken
import tokenizers

from octavo_engine.errors import ModelError
from octavo_engine.tokenization import tiktoken_file
from octavo_engine.tokenization.load import load_tokenizer
from octavo_engine.tokenization.token_pieces import byte_of_character
from octavo_engine.weights.source import ModelFiles
from tests.engine.tokenization.test_sentencepiece import TEXTS, WORDS, random_texts

if TYPE_CHECKING:
    from pathlib import Path


@functools.cache
def ranks() -> dict[bytes, int]:
    """A vocabulary of byte pairs, trained here."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rng = random.Random(3)
    lines = [" ".join(rng.choices(WORDS, k=9)) for _ in range(300)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    trained.train_from_iterator(lines, trainer)
    byte_of = byte_of_character()
    return {
        bytes(byte_of[letter] for letter in token): number
        for token, number in trained.get_vocab().items()
    }


def lines_of(given: dict[bytes, int]) -> bytes:
    return b"".join(
        base64.b64encode(token) + b" %d\n" % rank
        for token, rank in sorted(given.items(), key=lambda item: item[1])
    )


def write(folder: Path, name: str, data: bytes, **config: Any) -> ModelFiles:
    (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFiles("m", folder, "safetensors", {}, {})


GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


@pytest.mark.parametrize("name", tiktoken_file._BY_NAME)
def test_ids_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    encoding = tiktoken_file._BY_NAME[name]
    # \z of one engine is $ of the other, which has no classes in classes: it needs no second
    # reading of the rest.
    regex = (encoding.regex or GPT2).replace(r"\z", "$")
    truth = tiktoken.Encoding(
        "own", pat_str=regex, mergeable_ranks=ranks(), special_tokens={"<|x|>": len(ranks())}
    )
    ours = load_tokenizer(write(tmp_path, name, lines_of(ranks())))
    for text in [*TEXTS, *random_texts(300), "汉字 mixed漢字with latin", "DON'T Stop'S 12345"]:
        if encoding.nfc:
            import unicodedata

            assert ours.encode(text) == truth.encode_ordinary(unicodedata.normalize("NFC", text))
        else:
            assert ours.encode(text) == truth.encode_ordinary(text), repr(text)
            assert ours.decode(ours.encode(text)) == text


def test_qwens_special_tokens_follow_the_ranked_ones(tmp_path: Path) -> None:
    files = write(tmp_path, "qwen.tiktoken", lines_of(ranks()), tokenizer_class="QWenTokenizer",
                  eos_token="<|im_end|>", chat_template="{{ messages[0].content }}")  # fmt: skip
    tokenizer = load_tokenizer(files)
    size = len(ranks())
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|><|extra_204|>") == [
        size, size + 1, size + 2, size + 207,
    ]  # fmt: skip
    assert list(tokenizer.eos_token_ids) == [size + 2]
    assert tokenizer.chat_template is not None


def test_added_tokens_of_the_config_have_their_ids(tmp_path: Path) -> None:
    size = len(ranks())
    added = {str(size + i): {"content": text, "special": True} for i, text in enumerate("[]{}")}
    added = {key: {**value, "content": f"[{key}]"} for key, value in added.items()}
    files = write(tmp_path, "tiktoken.model", lines_of(ranks()), added_tokens_decoder=added,
                  tokenizer_class="TikTokenTokenizer")  # fmt: skip
    assert load_tokenizer(files).encode(f"the[{size + 2}]") == [
        *load_tokenizer(files).encode("the"), size + 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("other.tiktoken", lambda: lines_of(ranks()), "not known by its name; known are qwen"),
        (
            "qwen.tiktoken",
            lambda: lines_of(ranks()) + b"!! 7\n",
            r"line \d+: not a token in base64",
        ),
        ("qwen.tiktoken", lambda: lines_of(ranks()) + b"YQ== 900\n", "the token b'a' twice"),
        ("qwen.tiktoken", lambda: b"YQ== 0\n", "no token for the byte 0"),
        ("qwen.tiktoken", lambda: lines_of(ranks()) + b"YWJjZA== 5\n", "two tokens the same rank"),
    ],
)
def test_broken_files_are_model_errors(name: str, data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(write(tmp_path, name, data()))


def test_a_folder_without_any_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither tokenizer.json nor tokenizer.model \(Sent"):
        load_tokenizer(ModelFiles("m", tmp_path, "safetensors", {}, {}))
