"""The demo model's tokenizer, ours and the reference's; small vocabularies made on the spot."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo_engine.tokenization.load import load_tokenizer
from octavo_engine.weights.source import resolve_model


@pytest.fixture(scope="session")
def smollm2():
    return load_tokenizer(resolve_model("demo://smollm2"))


class Reference:
    """transformers' conversion of the same vocabulary, and its rendering of the same template."""

    def __init__(self, metadata) -> None:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

        names = {
            "tokenizer_type": "model",
            "pre_tokenizer_type": "pre",
            "tokens": "tokens",
            "merges": "merges",
            "token_type": "token_type",
        }
        fields = {name: metadata[f"tokenizer.ggml.{key}"] for name, key in names.items()}
        fields |= {name: list(fields[name]) for name in ("tokens", "merges", "token_type")}
        self.tokenizer, _ = convert_gguf_tokenizer("llama", fields)
        self.template = metadata["tokenizer.chat_template"]

    def encode(self, text):
        return self.tokenizer.encode(text).ids

    def decode(self, ids, *, skip):
        return self.tokenizer.decode(ids, skip_special_tokens=skip)

    def chat(self, messages, **options):
        from transformers.utils.chat_template_utils import render_jinja_template

        conversations = render_jinja_template([messages], chat_template=self.template, **options)
        return self.encode(conversations[0][0])


@pytest.fixture(scope="session")
def reference():
    return Reference(resolve_model("demo://smollm2").gguf_metadata)


@pytest.fixture(scope="session")
def fallback_vocabulary() -> Tokenizer:
    """SentencePiece-like: U+2581 for spaces, bytes as a fallback, a stripped first space."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello", "é"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u2581", "hello")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


@pytest.fixture(scope="session")
def metaspace_vocabulary() -> Tokenizer:
    """As newer Llama conversions: only the first piece of a text gets a space in front."""
    words = ["<unk>", "<s>", "\u2581", "a", "b", "<", "s", ">", "\u2581a", "ab"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a"), ("a", "b")], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer
