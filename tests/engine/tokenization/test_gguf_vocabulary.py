"""Tokenizers built from GGUF metadata, without a file: only what the builder reads."""

import numpy as np
import pytest

from octavo_engine.errors import ModelError
from octavo_engine.tokenization.gguf_vocabulary import gguf_tokenizer


class Strings(list):
    to_list = list.copy


def spm(tokens, *, scores=None, types=None, **more):
    count = len(tokens)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": Strings(tokens),
        "tokenizer.ggml.scores": np.array(scores or [-float(i) for i in range(count)], np.float32),
        "tokenizer.ggml.token_type": np.array(types or [1] * count, np.int32),
    } | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


BASE = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "c", "ab", "\u2581ab", "bc", "<0xC3>", "<0xA9>"]
TYPES = [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 6, 6]
IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokens_of(tokenizer, text):
    return tokenizer.encode(text).tokens


def test_sentencepiece_merges_by_score_and_begins_with_bos():
    tokenizer = gguf_tokenizer(spm(BASE, types=TYPES, **IDS), "m.gguf")
    assert tokens_of(tokenizer, "ab") == ["<s>", "\u2581ab"]
    assert tokens_of(tokenizer, "abc") == ["<s>", "\u2581ab", "c"]
    scores = [0, 0, 0, *(-9.0,) * 3, -9, -5, -8, -1, -9, -9]  # now bc is the best piece
    tokenizer = gguf_tokenizer(spm(BASE, scores=scores, types=TYPES, **IDS), "m.gguf")
    assert tokens_of(tokenizer, "abc") == ["<s>", "\u2581", "a", "bc"]


def test_sentencepiece_falls_back_to_bytes_and_comes_back():
    tokenizer = gguf_tokenizer(spm(BASE, types=TYPES, **IDS), "m.gguf")
    assert tokens_of(tokenizer, "é") == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("é ab").ids) == "é ab"


def test_control_tokens_are_special_and_flags_are_obeyed():
    metadata = spm(BASE, types=TYPES, **IDS, add_bos_token=False, add_eos_token=True)
    tokenizer = gguf_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False}, "m.gguf")
    assert tokens_of(tokenizer, "ab</s>a") == ["ab", "</s>", "a", "</s>"]
    assert tokenizer.decode([7, 2], skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("kind_of_run", [1, 4])  # text, or matched whole
def test_gemma_spells_runs_of_spaces_out_and_ranks_merges_by_position(kind_of_run):
    tokens = ["<pad>", "<bos>", "a", "\u2581", "b", "  ", "ab"]
    types = [3, 3, 1, 1, 1, kind_of_run, 1]
    metadata = spm(tokens, scores=[0.0] * 7, types=types, bos_token_id=1)
    metadata["general.architecture"] = "gemma3"
    tokenizer = gguf_tokenizer(metadata, "m.gguf")
    assert tokens_of(tokenizer, "ab  a") == ["<bos>", "ab", "\u2581\u2581", "a"]
    assert tokenizer.decode(tokenizer.encode("ab  a").ids) == "ab  a"
    assert tokenizer.get_vocab_size() == len(tokens)


def bpe(pre, tokens, merges):
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": Strings(tokens),
        "tokenizer.ggml.merges": Strings(merges),
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123", "Ġ45"]),
        ("smollm", ["1", "2", "3", "Ġ", "4", "5"]),
        ("llama-bpe", ["123", "Ġ", "45"]),
        ("qwen2", ["1", "2", "3", "Ġ", "4", "5"]),
        ("tekken", ["1", "2", "3", "Ġ", "4", "5"]),
        ("gpt-4o", ["123", "Ġ", "45"]),
        ("deepseek-llm", ["123", "Ġ", "45"]),
        ("deepseek-v3", ["123", "Ġ", "45"]),
        ("kimi-k2", ["123", "Ġ", "45"]),
        ("glm4", ["123", "Ġ", "45"]),
    ],
)
def test_numbers_are_cut_as_the_vocabulary_was_trained(pre, pieces):
    tokens = [*"12345", "Ġ", "12", "123", "45", "Ġ45"]
    metadata = bpe(pre, tokens, ["1 2", "12 3", "4 5", "Ġ 45"])
    assert tokens_of(gguf_tokenizer(metadata, "m.gguf"), "123 45") == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["ab中文cd", ",", " e", " \n", " 漢", "。"]),
        ("deepseek-llm", ["ab", "中文", "cd", ",", " e", " ", "\n", " ", "漢", "。"]),
        ("deepseek-v3", ["ab", "中文", "cd", ",", " e", " \n", " ", "漢", "。"]),
        ("kimi-k2", ["ab", "中文", "cd", ",", " e", " \n", " ", "漢", "。"]),
        ("glm4", ["ab中文cd", ",", " e", " \n", " 漢", "。"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_trained(pre, pieces):
    text = "ab中文cd, e \n 漢。"
    tokenizer = gguf_tokenizer(bpe(pre, ["a"], []), "m.gguf")
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[first:end] for _, (first, end) in cut] == pieces


def test_user_defined_tokens_are_matched_whole_but_are_not_special():
    metadata = bpe("gpt-2", ["a", "b", "<think>"], [])
    metadata["tokenizer.ggml.token_type"] = np.array([1, 1, 4], np.int32)
    tokenizer = gguf_tokenizer(metadata, "m.gguf")
    assert tokens_of(tokenizer, "a<think>b") == ["a", "<think>", "b"]
    assert tokenizer.decode([0, 2, 1], skip_special_tokens=True) == "a<think>b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "kind 'rwkv'; supported are gpt2, llama and bert"),
        ({"tokenizer.ggml.pre": "new-thing"}, "unknown rule 'new-thing'"),
        ({"tokenizer.ggml.tokens": Strings()}, "has no vocabulary"),
        ({"tokenizer.ggml.tokens": 5}, "tokens is not an array of strings"),
        ({"tokenizer.ggml.merges": Strings(["ab"])}, "merges that are not pairs"),
        ({"tokenizer.ggml.merges": Strings(["a zz"])}, "broken vocabulary"),
        ({"tokenizer.ggml.token_type": np.ones(9, np.int32)}, "9 token types for 2 tokens"),
        ({"tokenizer.ggml.model": "llama"}, "0 scores for 2 tokens"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ModelError, match=r"m\.gguf") as caught:
        gguf_tokenizer(bpe("gpt-2", ["a", "b"], []) | change, "m.gguf")
    assert message in str(caught.value)


def test_a_wordpiece_vocabulary_marks_the_beginnings_of_words():
    tokens = ["[UNK]", "[CLS]", "[SEP]", "\u2581the", "\u2581ti", "me", "\u2581."]
    metadata = spm(tokens, types=[2, 3, 3, 1, 1, 1, 1], unknown_token_id=0, cls_token_id=1,
                   seperator_token_id=2)  # fmt: skip
    tokenizer = gguf_tokenizer(metadata | {"tokenizer.ggml.model": "bert"}, "m.gguf")
    assert tokenizer.encode("The time. x").ids == [1, 3, 4, 5, 6, 0, 2]
    assert tokenizer.decode([3, 4, 5, 6]) == "the time."
