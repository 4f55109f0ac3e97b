"""Vocabularies in GGUF files against the ids that llama.cpp's sources expect of them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from octavo_engine.errors import ModelError
from octavo_engine.tokenization.gguf_vocabulary import gguf_tokenizer
from octavo_engine.weights.gguf import GGUFFile

pytestmark = pytest.mark.slow

READ = ("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe",
        "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder")  # fmt: skip
REFUSED = {"gemma-4": "the kind 'gemma4'"}
BETWEEN = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models in the sources that the package llama-cpp-python ships."""
    folder = tmp_path_factory.mktemp("llama-cpp")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "llama-cpp-python==0.3.36", "--no-deps", "-q",
         "--no-binary", ":all:", "--no-build-isolation", "-d", str(folder)],
        check=True,
    )  # fmt: skip
    (package,) = folder.glob("*.tar.gz")
    with tarfile.open(package) as sources:
        for member in sources.getmembers():
            name = Path(member.name).name
            content = sources.extractfile(member) if name.startswith("ggml-vocab-") else None
            if content is not None:
                (folder / name).write_bytes(content.read())
    return folder


def test_each_vocabulary_with_expected_ids_is_read_or_refused(vocabularies: Path) -> None:
    shipped = {path.name[len("ggml-vocab-") : -len(".gguf.out")]
               for path in vocabularies.glob("*.gguf.out")}  # fmt: skip
    assert shipped == {*READ, *REFUSED}


@pytest.mark.parametrize("name", READ)
def test_ids_are_those_that_llama_cpp_expects(name: str, vocabularies: Path) -> None:
    file = vocabularies / f"ggml-vocab-{name}.gguf"
    tokenizer = gguf_tokenizer(GGUFFile(file).metadata, file.name)
    texts = Path(f"{file}.inp").read_text().split(BETWEEN)
    expected = Path(f"{file}.out").read_text().splitlines()
    assert len(texts) == len(expected) + 1  # nothing follows the last mark
    assert len(expected) > 40
    for text, line in zip(texts, expected, strict=False):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [int(number) for number in line.split()], repr(text)


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str, vocabularies: Path) -> None:
    file = vocabularies / f"ggml-vocab-{name}.gguf"
    with pytest.raises(ModelError, match=REFUSED[name]):
        gguf_tokenizer(GGUFFile(file).metadata, file.name)
