"""Loads a tokenizer and its chat template from a model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from octavo_engine.errors import ConfigError, ModelError, is_failure
from octavo_engine.tokenization.chat_template import ChatTemplate
from octavo_engine.tokenization.gguf_vocabulary import gguf_tokenizer, token_by_role
from octavo_engine.tokenization.other_files import add_ends, other_tokenizer
from octavo_engine.tokenization.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.tokenization.tokenizer import TokenizerFiles

MAX_JSON_BYTES = 256 * 2**20
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                  "mask_token")  # fmt: skip


def load_tokenizer(
    files: TokenizerFiles, *, override: str | None = None, chat_template: str | None = None
) -> TextTokenizer:
    """The model's tokenizer, or the one `override` names; `chat_template` is a file or a template.

    Raises ModelError that names the file, ConfigError for a chat template that is not there.
    """
    if override is not None:
        files = files.with_tokenizer(override)
    metadata = files.gguf_metadata
    try:
        if metadata is not None:
            return _from_gguf(files, metadata, chat_template)
        return _from_folder(files, chat_template)
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        # The library's own code met what it took for impossible.
        raise ModelError(f"{files.path} has no usable tokenizer: {error}") from None


def _from_gguf(
    files: TokenizerFiles, metadata: Mapping[str, Any], chat_template: str | None
) -> TextTokenizer:
    where = str(files.path)
    tokenizer = gguf_tokenizer(metadata, where)
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: token_by_role(metadata, role) for name, role in roles.items()}
    special = {name: token[1] for name, token in found.items() if token is not None}
    eos, bos = found["eos_token"], found["bos_token"]
    own = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": text
        for key, text in metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(text, str)
    }
    return TextTokenizer(
        tokenizer,
        where=where,
        eos_token_ids=_end_ids(files, None if eos is None else eos[0]),
        bos_token_id=None if bos is None else bos[0],
        chat_template=_template(chat_template, own, special, where),
    )


def _from_folder(files: TokenizerFiles, chat_template: str | None) -> TextTokenizer:
    folder = files.path if files.path.is_dir() else files.path.parent
    file = files.path if files.path.is_file() else folder / "tokenizer.json"
    tokenizer = _read_tokenizer(file) if file.exists() else None
    config = _read_object(folder / "tokenizer_config.json")
    if tokenizer is None:
        file, tokenizer = other_tokenizer(folder, config)
    special = _special_tokens(config) or _special_tokens(
        _read_object(folder / "special_tokens_map.json")
    )
    _add_tokens(tokenizer, config, special, file)
    if file.suffix != ".json":
        add_ends(tokenizer, config, special)
    eos, bos = (tokenizer.token_to_id(special.get(role, "")) for role in ("eos_token", "bos_token"))
    return TextTokenizer(
        tokenizer,
        where=str(file),
        eos_token_ids=_end_ids(files, eos),
        bos_token_id=bos,
        chat_template=_template(
            chat_template, _own_templates(folder, config), special, str(folder)
        ),
    )


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{file} has {size} bytes; at most {MAX_JSON_BYTES} are read")
        return tokenizers.Tokenizer.from_str(file.read_bytes().decode())
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file} is not a usable tokenizer: {error}") from None


def _add_tokens(
    tokenizer: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    special: Mapping[str, str],
    file: Path,
) -> None:
    """Tokens that only tokenizer_config.json knows, and the special ones tokenizer.json forgot."""
    declared = config.get("added_tokens_decoder")
    in_order = sorted(declared.items(), key=_number) if isinstance(declared, dict) else ()
    for key, fields in in_order:
        content = fields.get("content") if isinstance(fields, dict) else None
        if not isinstance(content, str) or tokenizer.token_to_id(content) is not None:
            continue
        flags = {
            k: fields.get(k) is True for k in ("single_word", "lstrip", "rstrip", "normalized")
        }
        is_special = fields.get("special") is True
        tokenizer.add_tokens([tokenizers.AddedToken(content, special=is_special, **flags)])
        if str(tokenizer.token_to_id(content)) != key:
            raise ModelError(
                f"{file.parent / 'tokenizer_config.json'} gives {content!r:.60} the id {key}, "
                f"{file.name} has no room for it there"
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    more = config.get("additional_special_tokens")
    wanted = [*special.values(), *(_text_of(token) for token in _list(more))]
    forgotten = [
        tokenizers.AddedToken(text, special=True, normalized=False)
        for text in dict.fromkeys(wanted)
        if text and text not in known and tokenizer.token_to_id(text) is not None
    ]
    tokenizer.add_tokens(forgotten)


def _number(item: tuple[str, Any]) -> tuple[int, str]:
    """Ids are written as strings."""
    key = item[0]
    return (int(key) if key.isdecimal() and len(key) < 10 else 0), key


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {role: _text_of(config.get(role)) for role in _SPECIAL_ROLES}
    return {role: text for role, text in texts.items() if text}


def _text_of(token: Any) -> str:
    """A token is written as a string, or as an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _end_ids(files: TokenizerFiles, own: int | None) -> list[int]:
    """Every id that any of the files calls the end, the generation config's first."""
    ids: list[int] = []
    for value in (
        files.generation_config.get("eos_token_id"),
        files.config.get("eos_token_id"),
        own,
    ):
        ids += [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]
    return list(dict.fromkeys(i for i in ids if i >= 0))


def _own_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja wins over chat_template.json, and that over tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return {"default": _read_text(file)}
    template = _read_object(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    return {
        entry["name"]: entry["template"]
        for entry in _list(template)
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }


def _template(
    override: str | None, own: Mapping[str, str], special: Mapping[str, str], where: str
) -> ChatTemplate | None:
    if override is not None:
        try:
            text = override if "{" in override or "\n" in override else _read_text(Path(override))
            return ChatTemplate(text, special_tokens=special, where="--chat-template")
        except ModelError as error:
            raise ConfigError(f"--chat-template: {error}") from None
    if not own:
        return None
    return ChatTemplate(own, special_tokens=special, where=f"the chat template of {where}")


def _read_text(file: Path) -> str:
    try:
        return file.expanduser().read_bytes().decode()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ModelError(f"{file} is not UTF-8 text") from None


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file that need not exist."""
    if not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
