"""Settings that state what a model is: they change nothing, and a model that differs is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import ModelError
from octavo_engine.tokenization.files import TOKENIZER_FILES, has_tokenizer
from octavo_engine.weights.safetensors import weight_files

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.source import ModelFiles


def weight_format_of(files: ModelFiles) -> str:
    """gguf, what config.json calls its quantization, or "" for weights that are not quantized."""
    if files.kind == "gguf":
        return "gguf"
    quantization = files.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return method if isinstance(method, str) else ""


def check_files(config: EngineConfig, files: ModelFiles) -> None:
    """--load-format and --weight-format, and what is missing. Raises ModelError that states what
    the files are."""
    if config.load_format not in ("auto", "dummy", files.kind):
        raise ModelError(
            f"--load-format {config.load_format} does not fit {files.reference}, which is "
            f"{files.kind}; leave it out"
        )
    found = weight_format_of(files)
    if config.weight_format not in ("auto", found):
        state = f"is {found}" if found else "is not quantized"
        advice = "leave it out" if found else "--quantization int8 or int4 makes it smaller"
        raise ModelError(
            f"--quantization {config.weight_format} does not fit {files.reference}, which {state}; "
            f"{advice}"
        )
    _check_complete(config, files)


def _check_complete(config: EngineConfig, files: ModelFiles) -> None:
    """A folder that lacks both weights and tokenizer hears of both at once. One of them is reported
    where it is read. Raises ModelError."""
    if files.kind != "safetensors" or config.load_format == "dummy" or config.tokenizer is not None:
        return
    if has_tokenizer(files.path):
        return
    try:
        weight_files(files.path)
    except ModelError as error:
        raise ModelError(f"{error}; it has no tokenizer either: {TOKENIZER_FILES}") from None


def check_runner(config: EngineConfig, *, pools: bool) -> None:
    """--runner. Raises ModelError that states what the model is for."""
    found = "pooling" if pools else "generate"
    if config.runner not in ("auto", found):
        purpose = "embeddings, scores or classes" if pools else "generating text"
        raise ModelError(
            f"--runner {config.runner} does not fit {config.names[0]}, which is for {purpose}; "
            "leave it out"
        )
