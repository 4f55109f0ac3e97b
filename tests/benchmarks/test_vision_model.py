"""What the model that sees is trained on, and that the engine reads the files that are written.

tests/octavo/test_seeing.py trains one and asks it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from benchmarks import vision_model
from benchmarks.vision_model import LINES, PLACEHOLDER, SIDE, WORDS, LanguageModel
from benchmarks.vision_pictures import (
    COLOURS,
    DIGITS,
    NOTHING,
    Question,
    Scene,
    Thing,
    questions,
    render,
    scenes,
    sentences,
)
from octavo_engine.core.media.prepare import prepare
from octavo_engine.core.media.prompt import PictureTokens
from octavo_engine.core.media.spec import read_picture_spec
from octavo_engine.models.config import ModelConfig
from octavo_engine.tokenization.load import load_tokenizer
from octavo_engine.weights.source import resolve_model
from tests.fakes.seeing import encoded

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 64
SCENE = Scene(
    (128, 128, 128),
    (
        Thing("square", "red", COLOURS["red"], 0.75, 0.25, 0.4),
        Thing("7", "blue", COLOURS["blue"], 0.25, 0.75, 0.4),
    ),
)


def test_each_quarter_is_said_in_its_own_line() -> None:
    assert sentences(SCENE) == [
        NOTHING,
        ("The", "square", "is", "red", "."),
        ("The", "digit", "is", "7", "."),
        NOTHING,
    ]
    assert questions(SCENE) == [
        Question("What colour is the square?", "red"),
        Question("Which shape is red?", "square"),
        Question("Which digit is in the picture?", "7"),
    ]
    picture = render(SCENE, 100)
    assert picture.getpixel((75, 25)) == COLOURS["red"]
    assert picture.getpixel((25, 25)) == picture.getpixel((75, 75)) == SCENE.background
    colours = {colour for _, colour in picture.crop((0, 50, 50, 100)).getcolors() or ()}
    assert COLOURS["blue"] in colours and COLOURS["red"] not in colours


def test_things_stay_in_their_quarters_and_seeds_in_their_own_pictures() -> None:
    some = list(islice(scenes(3), 200))
    for scene in some:
        digits = [thing for thing in scene.things if thing.kind in DIGITS]
        assert len(digits) == 1 and 2 <= len(scene.things) <= 3
        assert len({thing.colour for thing in scene.things}) == len(scene.things)
        for thing in scene.things:
            for middle in (thing.x, thing.y):
                first, last = middle - thing.size / 2, middle + thing.size / 2
                assert int(first * 2) == int(last * 2) and 0 < first < last < 1
    assert list(islice(scenes(3), 5)) == some[:5]
    assert not {*some} & {*islice(scenes(4), 200)}


def test_mixed_pictures_show_what_their_words_say() -> None:
    """Each quarter is one of the given pictures', and brings its words."""
    torch.manual_seed(0)
    given = vision_model.draw(islice(scenes(1), 6))
    made = vision_model.mixed(given, 40)
    half = SIDE // 2

    def quarters(pictures: vision_model.Pictures) -> list[tuple[bytes, tuple[int, ...]]]:
        return [
            (
                pixels[top : top + half, left : left + half].numpy().tobytes(),
                tuple(words[2 * (top > 0) + (left > 0)].tolist()),
            )
            for pixels, words in zip(*pictures, strict=True)
            for top in (0, half)
            for left in (0, half)
        ]

    own = dict(quarters(given))
    assert all(own[pixels] == words for pixels, words in quarters(made))
    # Mixed indeed: most pictures are not as they were given.
    assert len({pixels.numpy().tobytes() for pixels in made.pixels}) > len(given.pixels)


def test_rows_are_right_where_they_are_nearest_to_their_word() -> None:
    pictures = vision_model.draw(islice(scenes(1), 8))
    embeddings = torch.randn(len(WORDS), SIZE, generator=torch.Generator().manual_seed(1))
    rows = embeddings[vision_model.targets(pictures.words)]
    assert rows.shape == (8 * LINES**2, SIZE)

    class Exact:
        def rows(self, pixels: torch.Tensor) -> torch.Tensor:
            return rows + 0.01

    exact: Any = Exact()
    assert vision_model.right_rows(exact, pictures, embeddings) == 1.0
    rows = embeddings[torch.zeros(8 * LINES**2, dtype=torch.long)]  # "The" everywhere
    assert vision_model.right_rows(exact, pictures, embeddings) == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        ("The square is red.", True),
        ("Red, I think.", True),
        ("The square is blue, not red.", False),
        ("The square is a shape.", False),
        ("", False),
    ],
)
def test_an_answer_is_its_first_word_that_could_be_one(said: str, is_right: bool) -> None:
    question = Question("What colour is the square?", "red")
    assert vision_model.is_right(question, said) == is_right


def test_a_word_of_the_question_is_no_answer() -> None:
    question = Question("Which shape is red?", "square")
    assert vision_model.is_right(question, "The red shape is a square.")
    assert not vision_model.is_right(question, "The red shape is a circle.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an encoder that has learnt nothing, and a language model of no layers' weights."""
    vocabulary = {word: index for index, word in enumerate(("<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    embeddings = torch.zeros(len(vocabulary), SIZE).bfloat16()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SIZE,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(vocabulary), "tie_word_embeddings": True,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": [2],
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": embeddings, "model.norm.weight": torch.ones(SIZE)}
    language = LanguageModel(config, tensors, tokenizer)
    folder = tmp_path_factory.mktemp("model") / "seeing"
    vision_model.write_checkpoint(folder, language, vision_model.Encoder(SIZE))
    return folder


@pytest.mark.slow  # transformers' modules are imported
def test_the_engine_prepares_pictures_as_they_were_trained_on(folder: Path) -> None:
    spec = read_picture_spec(resolve_model(str(folder)))
    assert spec is not None
    trained = vision_model.draw([SCENE]).pixels[0].numpy()
    prepared = prepare(encoded(render(SCENE)), spec).picture
    assert prepared is not None
    (tile,) = prepared.tiles
    assert (spec.mean, spec.std) == ((0.5,) * 3, (0.5,) * 3)
    assert spec.scale == pytest.approx(1 / 255)
    served = np.frombuffer(tile.pixels, np.uint8).reshape(tile.height, tile.width, 3)
    np.testing.assert_array_equal(served, trained)
    assert trained.shape == (SIDE, SIDE, 3)


@pytest.mark.slow  # transformers' modules are imported
def test_the_checkpoint_has_a_placeholder_that_no_text_spells(folder: Path) -> None:
    files = resolve_model(str(folder))
    tokenizer = load_tokenizer(files)
    spec = read_picture_spec(files)
    assert spec is not None
    tokens = PictureTokens(spec.media, tokenizer)
    assert tokenizer.token_name(tokens.placeholder) == PLACEHOLDER
    assert spec.media.num_rows == LINES**2
    config = ModelConfig.from_hf(files.config)
    assert config.vocab_size > tokens.placeholder and config.vocab_size % 16 == 0
