"""/score and /rerank over a real cross-encoder: its own tokenizer, kernels and head.

The truth is transformers' model on transformers' reading of the pairs. Red when the two texts are
put together in another way, a segment is told wrongly, or scores change places.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.connect import in_process
from tests.engine.models.tiny_poolers import tiny_classifier
from tests.engine.server.pooling.test_minilm import DOCUMENTS, QUESTION, Rig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

    from octavo_engine.config import EngineConfig

pytestmark = pytest.mark.slow

WORDS = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "the", "capital", "of", "france", "bananas",
    "are", "yellow", "paris", "berlin", "in", "germany", ".", "?", "##s", "##an",
)  # fmt: skip


def reader() -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = BertNormalizer(lowercase=True)
    made.pre_tokenizer = BertPreTokenizer()
    made.decoder = WordPieceDecoder()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip


class FullPrecision(Rig):
    @staticmethod
    async def _start(config: EngineConfig) -> AsyncEngine:
        engine = await AsyncEngine.start(config.replace(dtype="float32"), connect=in_process)
        await engine.ready()
        return engine


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("cross") / "model"
    shutil.copytree(tiny_classifier("bert-score").folder, folder)
    reader().save_pretrained(folder)
    rig = FullPrecision(folder)
    yield rig
    rig.close()


def truth(first: str, second: str) -> float:
    read: Any = reader()(first, second, return_token_type_ids=True)
    (logit,) = tiny_classifier("bert-score").logits(read["input_ids"], read["token_type_ids"])
    return float(1 / (1 + np.exp(-logit)))


def test_scores_are_those_of_the_model_for_pairs_of_texts(rig: Rig) -> None:
    answer = rig.ask("/score", text_1=QUESTION, text_2=DOCUMENTS)
    scores = [each["score"] for each in answer["data"]]

    assert scores == pytest.approx([truth(QUESTION, text) for text in DOCUMENTS], abs=1e-5)
    assert len(set(scores)) == len(DOCUMENTS)
    turned = rig.ask("/score", text_1=DOCUMENTS[0], text_2=QUESTION)["data"][0]["score"]
    assert turned == pytest.approx(truth(DOCUMENTS[0], QUESTION), abs=1e-5)
    assert abs(turned - scores[0]) > 1e-4  # which text comes first matters


def test_a_ranking_has_the_best_first_and_names_each_document(rig: Rig) -> None:
    results = rig.ask("/rerank", query=QUESTION, documents=DOCUMENTS, top_n=2)["results"]
    wanted = sorted(((truth(QUESTION, text), i) for i, text in enumerate(DOCUMENTS)), reverse=True)

    assert [each["index"] for each in results] == [i for _, i in wanted[:2]]
    assert [each["relevance_score"] for each in results] == pytest.approx(
        [score for score, _ in wanted[:2]], abs=1e-5
    )
    assert [each["document"]["text"] for each in results] == [
        DOCUMENTS[each["index"]] for each in results
    ]
