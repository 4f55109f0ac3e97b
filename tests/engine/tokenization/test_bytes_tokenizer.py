"""The simulator's tokenizer: no files, no heavy imports."""

import subprocess
import sys

import pytest

from octavo_engine.errors import ConfigError, InvalidRequest
from octavo_engine.tokenization.bytes_tokenizer import BOS, EOS, ByteTokenizer


def test_text_is_its_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é") == [BOS, 0xC3, 0xA9]
    assert tokenizer.encode_batch(["a", "b"], add_special_tokens=False) == [[97], [98]]
    assert tokenizer.decode([BOS, 0xC3, 0xA9, EOS]) == "é"
    assert tokenizer.decode([BOS, 97, EOS], skip_special_tokens=False) == "<s>a</s>"


def test_every_made_up_word_is_a_different_one():
    tokenizer = ByteTokenizer(vocab_size=3000)
    words = [tokenizer.token_text(i) for i in range(EOS + 1, 3000)]
    assert words[:3] == [" aa", " ba", " ca"]
    assert len(set(words)) == len(words)
    assert tokenizer.token_bytes(3000) == b""


def test_chats_and_control_look_alikes():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_chat([{"role": "user", "content": "</s>"}])
    assert tokenizer.decode(ids) == "<|user|>\n</s>\n<|assistant|>\n"
    assert EOS not in ids
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]).startswith("<|user|>")


def test_refusals():
    with pytest.raises(InvalidRequest, match="token id 512 is outside the vocabulary of 512"):
        ByteTokenizer().decode([512])
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        ByteTokenizer().encode("\udfff")
    with pytest.raises(InvalidRequest, match="at least one message"):
        ByteTokenizer().encode_chat([])
    with pytest.raises(ConfigError, match="at least 258 tokens; got 100"):
        ByteTokenizer(100)


def test_importing_it_loads_neither_tokenizers_nor_jinja2():
    code = (
        "import sys; import octavo_engine.tokenization.bytes_tokenizer, "
        "octavo_engine.tokenization.tokenizer, octavo_engine.tokenization.detokenizer, "
        "octavo_engine.tokenization.stop_strings; "
        "print([m for m in ('tokenizers', 'jinja2', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
