"""Builds a tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from octavo_engine.errors import ModelError
from octavo_engine.tokenization.scored_merges import merges_by_score

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CONTROL, _USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type
_UNDERSCORE = "\u2581"

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FALCON = (
    r"[\p{P}$+<=>^~|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[0-9][0-9][0-9]",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
# Letters with case, but those of scripts and blocks that the family's own list leaves out.
_DEEPSEEK_LETTER = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&"
    "[^\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105ff\U00016e40-\U0001dfff]]"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_DEEPSEEK_LETTER}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN = r"\p{Han}"
_UPPER_NOT_HAN = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]"
_LOWER_NOT_HAN = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]"
KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_SUFFIXES}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_SUFFIXES}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """How text is cut before merges apply."""

    regex: str | tuple[str, ...] | None = None  # several: one after the other; None: GPT-2's own
    digits: bool = False  # each digit alone first
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token needs no merging
    adds_bos: bool = False  # where the file does not say


# By tokenizer.ggml.pre. Unknown names are refused: the wrong cut gives text that is almost right.
_SPLITS: Mapping[str, _Split] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "jais", "mpt", "trillion"), _Split()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _Split(digits=True),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _Split(LLAMA3, ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(LLAMA3)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _Split(QWEN2, nfc=True)
    ),
    "qwen35": _Split(_QWEN35),
    "falcon": _Split(_FALCON),
    "deepseek-coder": _Split(_DEEPSEEK_CODER),
    "deepseek-llm": _Split(_DEEPSEEK_LLM),
    "deepseek-v3": _Split(_DEEPSEEK_V3),
    "kimi-k2": _Split(KIMI),
    "glm4": _Split(LLAMA3),
    "tekken": _Split(_TEKKEN, ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split(GPT4O)),
}  # fmt: skip


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that the metadata describes; raises ModelError."""
    vocabulary = _Vocabulary(metadata, where)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = vocabulary.byte_level()
    elif kind == "llama":
        tokenizer, adds_bos = vocabulary.sentencepiece()
    elif kind == "bert":
        return vocabulary.wordpiece()
    else:
        raise ModelError(
            f"{where} has a vocabulary of the kind {kind!r:.40}; supported are gpt2, llama and bert"
        )
    vocabulary.add_special_tokens(tokenizer)
    vocabulary.add_ends(tokenizer, adds_bos=adds_bos)
    return tokenizer


def token_by_role(metadata: Mapping[str, Any], role: str) -> tuple[int, str] | None:
    """Id and text of the token named by tokenizer.ggml.`role`_token_id."""
    token = metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if type(token) is not int or tokens is None or not 0 <= token < len(tokens):
        return None
    return token, str(tokens[token])


class _Vocabulary:
    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where
        self._tokens = self._strings("tokens")
        self._types = self._numbers("token_type")
        if not self._tokens:
            raise ModelError(f"{where} has no vocabulary (tokenizer.ggml.tokens)")
        if self._types and len(self._types) != len(self._tokens):
            raise ModelError(
                f"{where}: {len(self._types)} token types for {len(self._tokens)} tokens"
            )

    def byte_level(self) -> tuple[Tokenizer, bool]:
        name = self._metadata.get("tokenizer.ggml.pre", "default")
        split = _SPLITS.get(name) if isinstance(name, str) else None
        if split is None:
            raise ModelError(
                f"{self._where} cuts text by the unknown rule {name!r:.40} (tokenizer.ggml.pre); "
                "pass the folder of the original tokenizer.json with --tokenizer"
            )
        vocab = {token: i for i, token in enumerate(self._tokens)}
        tokenizer = Tokenizer(self._bpe(vocab, self._merges(), ignore_merges=split.ignore_merges))
        if split.nfc:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
        regexes = (split.regex,) if isinstance(split.regex, str) else split.regex or ()
        steps += [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in regexes]
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, split.adds_bos

    def sentencepiece(self) -> tuple[Tokenizer, bool]:
        # Gemma's files spell runs of spaces as they are, its merges want them as underscores; and
        # its scores do not rank merges, the order of the tokens does.
        architecture = self._metadata.get("general.architecture")
        is_gemma = isinstance(architecture, str) and architecture.startswith("gemma")
        tokens = self._tokens
        if is_gemma:
            tokens = [_UNDERSCORE * len(t) if t and not t.strip(" ") else t for t in tokens]
            self._tokens = tokens  # some files say that these too are matched whole
        scores: Sequence[float] = self._numbers("scores")
        if is_gemma:
            scores = range(0, -len(tokens), -1)
        elif len(scores) != len(tokens):
            raise ModelError(f"{self._where}: {len(scores)} scores for {len(tokens)} tokens")
        vocab = {token: i for i, token in enumerate(tokens)}
        merges = self._merges() or merges_by_score(vocab, dict(zip(tokens, scores, strict=True)))
        unknown = token_by_role(self._metadata, "unknown")
        tokenizer = Tokenizer(
            self._bpe(
                vocab,
                merges,
                byte_fallback=True,
                fuse_unk=True,
                unk_token=None if unknown is None else unknown[1],
            )
        )
        steps: list[Any] = [normalizers.Replace(" ", _UNDERSCORE)]
        decoding: list[Any] = [
            decoders.Replace(_UNDERSCORE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if self._flag("add_space_prefix", not is_gemma):
            steps.insert(0, normalizers.Prepend(_UNDERSCORE))
            decoding.append(decoders.Strip(" ", 1, 0))
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Sequence(decoding)
        return tokenizer, True

    def wordpiece(self) -> Tokenizer:
        """In the file a word's first piece begins with U+2581, and later ones have no mark."""
        unknown = token_by_role(self._metadata, "unknown")
        ends = [token_by_role(self._metadata, role) for role in ("cls", "seperator")]
        if ends[0] is None:  # newer files call it bos
            ends[0] = token_by_role(self._metadata, "bos")
        if ends[1] is None:
            ends[1] = token_by_role(self._metadata, "separator")
        kinds = self._types or [1] * len(self._tokens)
        vocab = {
            token if kind == _CONTROL or (unknown is not None and i == unknown[0])
            else token.removeprefix(_UNDERSCORE) if token.startswith(_UNDERSCORE)
            else f"##{token}": i
            for i, (token, kind) in enumerate(zip(self._tokens, kinds, strict=True))
        }  # fmt: skip
        name = "[UNK]" if unknown is None else unknown[1]
        tokenizer = Tokenizer(
            models.WordPiece(vocab=vocab, unk_token=name, max_input_chars_per_word=100)
        )
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        self.add_special_tokens(tokenizer)
        before, after = ends
        if before is not None and after is not None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[before[1], "$A", after[1]],
                special_tokens=[(before[1], before[0]), (after[1], after[0])],
            )
        return tokenizer

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        """Control tokens, and the ones that are matched whole although they are text."""
        added = [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(self._tokens, self._types, strict=False)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
        tokenizer.add_tokens(added)

    def add_ends(self, tokenizer: Tokenizer, *, adds_bos: bool) -> None:
        bos, eos = (token_by_role(self._metadata, role) for role in ("bos", "eos"))
        before = bos if bos is not None and self._flag("add_bos_token", adds_bos) else None
        after = eos if eos is not None and self._flag("add_eos_token", False) else None
        ends = {text: i for i, text in filter(None, (before, after))}
        if not ends:
            return
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([before[1]] if before else []), "$A", *([after[1]] if after else [])],
            special_tokens=list(ends.items()),
        )

    def _bpe(self, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
        try:
            return models.BPE(vocab=vocab, merges=merges, **options)
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{self._where} has a broken vocabulary: {error}") from None

    def _merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ", 1)) for merge in self._strings("merges")]
        merges = [pair for pair in pairs if len(pair) == 2]
        if len(merges) != len(pairs):
            raise ModelError(f"{self._where} has merges that are not pairs (tokenizer.ggml.merges)")
        return merges

    def _strings(self, name: str) -> list[str]:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if values is None:
            return []
        if not hasattr(values, "to_list"):
            raise ModelError(f"{self._where}: tokenizer.ggml.{name} is not an array of strings")
        strings: list[str] = values.to_list()
        return strings

    def _numbers(self, name: str) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if values is None:
            return []
        if not hasattr(values, "tolist"):
            raise ModelError(f"{self._where}: tokenizer.ggml.{name} is not an array of numbers")
        numbers: list[Any] = values.tolist()
        return numbers

    def _flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        return value if isinstance(value, bool) else default
