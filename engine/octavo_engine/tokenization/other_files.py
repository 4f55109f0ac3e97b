"""Tokenizers of folders without a tokenizer.json: SentencePiece's and tiktoken's own files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import processors

from octavo_engine.errors import ModelError
from octavo_engine.tokenization.files import TOKENIZER_FILES, other_files
from octavo_engine.tokenization.sentencepiece_model import parse_model
from octavo_engine.tokenization.sentencepiece_tokenizer import sentencepiece_tokenizer
from octavo_engine.tokenization.tiktoken_file import is_tiktoken, tiktoken_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import tokenizers

MAX_BYTES = 64 * 2**20

# Classes whose ids are not the pieces' places in tokenizer.model.
_RENUMBERING = (
    "BarthezTokenizer", "BigBirdTokenizer", "CamembertTokenizer", "DebertaV2Tokenizer",
    "M2M100Tokenizer", "MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer", "PegasusTokenizer",
    "PLBartTokenizer", "SeamlessM4TTokenizer", "XGLMTokenizer", "XLMRobertaTokenizer",
    "XLNetTokenizer", "ReformerTokenizer", "FNetTokenizer", "RemBertTokenizer",
)  # fmt: skip
# Whether a class puts bos before a text and eos after it, where the file does not say.
_ENDS = {
    "LlamaTokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "InternLMTokenizer": (True, False),
    "InternLM2Tokenizer": (True, False),
    "InternLM3Tokenizer": (True, False),
    "T5Tokenizer": (False, True),
    "MT5Tokenizer": (False, True),
}


def other_tokenizer(folder: Path, config: Mapping[str, Any]) -> tuple[Path, tokenizers.Tokenizer]:
    """The file that was found, and its tokenizer without special tokens that only `config`,
    tokenizer_config.json, names. Raises ModelError."""
    own_class = _class(config)
    found = other_files(folder)
    if not found:
        raise ModelError(f"{folder} has no tokenizer: {TOKENIZER_FILES}")
    file = found[0]
    data = _read(file)
    if is_tiktoken(data):
        return file, tiktoken_tokenizer(data, file, own_class)
    if own_class in _RENUMBERING:
        raise ModelError(
            f"{file}: {own_class} numbers pieces in its own way; make a tokenizer.json with "
            "transformers (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )
    adds_prefix = config.get("add_prefix_space")
    return file, sentencepiece_tokenizer(
        parse_model(data, str(file)),
        str(file),
        adds_prefix=adds_prefix if isinstance(adds_prefix, bool) else None,
        prefix_each_part=config.get("legacy") is not False,
    )


def add_ends(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """bos before each text and eos after it, as tokenizer_config.json or its class says."""
    defaults = _ENDS.get(_class(config), (False, False))
    ends = []
    for name, default in zip(("bos", "eos"), defaults, strict=True):
        given = config.get(f"add_{name}_token")
        text = special.get(f"{name}_token", "")
        number = tokenizer.token_to_id(text) if text else None
        is_added = given if isinstance(given, bool) else default
        ends.append((text, number) if is_added and number is not None else None)
    before, after = ends
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([before[0]] if before else []), "$A", *([after[0]] if after else [])],
            special_tokens=list({end[0]: end for end in ends if end}.values()),
        )


def _class(config: Mapping[str, Any]) -> str:
    name = config.get("tokenizer_class")
    return name.removesuffix("Fast") if isinstance(name, str) else ""


def _read(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise ModelError(f"{file} has {size} bytes; at most {MAX_BYTES} are read")
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
