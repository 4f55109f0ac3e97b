"""Loading from a folder: which file wins, what is forgiven, what is refused."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.tokenization.load import load_tokenizer
from octavo_engine.weights.source import ModelFiles


def small_tokenizer() -> Tokenizer:
    vocab = {"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def folder_of(tmp_path, **files) -> ModelFiles:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name.replace("__", ".")).write_text(text)
    return ModelFiles(str(tmp_path), tmp_path, "safetensors", {"eos_token_id": 4}, {})


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "of config"}


def rendered(tokenizer, **options):
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template.render([{"role": "user", "content": "x"}], **options)


def test_config_names_the_special_tokens_and_the_template(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, tokenizer_config__json=CONFIG))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (3, (4,))
    assert tokenizer.special_ids == {3, 4}  # </s> too, though tokenizer.json forgot it
    assert rendered(tokenizer) == "of config"


def test_template_file_wins_over_config_and_the_users_over_both(tmp_path):
    files = folder_of(
        tmp_path,
        tokenizer_config__json=CONFIG,
        chat_template__jinja="of file {{ bos_token }}",
        mine__jinja="mine",
    )
    assert rendered(load_tokenizer(files)) == "of file <s>"
    path = str(tmp_path / "mine.jinja")
    assert rendered(load_tokenizer(files, chat_template=path)) == "mine"
    assert rendered(load_tokenizer(files, chat_template="{{ 1 + 1 }}")) == "2"


def test_named_templates(tmp_path):
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    files = folder_of(tmp_path, tokenizer_config__json={"chat_template": templates})
    tokenizer = load_tokenizer(files)
    assert rendered(tokenizer) == "d"
    assert rendered(tokenizer, tools=[{}]) == "t"


def test_no_template_at_all(tmp_path):
    assert load_tokenizer(folder_of(tmp_path)).chat_template is None


def test_end_tokens_are_gathered_from_all_files(tmp_path):
    files = folder_of(tmp_path, tokenizer_config__json={"eos_token": "</s>"})
    files.generation_config["eos_token_id"] = [2, 3]
    assert load_tokenizer(files).eos_token_ids == (2, 3, 4)


def test_added_tokens_of_the_config_get_their_ids(tmp_path):
    added = {"5": {"content": "<x>", "special": True}, "3": {"content": "<s>", "special": True}}
    files = folder_of(tmp_path, tokenizer_config__json={"added_tokens_decoder": added})
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode("a<x>") == [0, 5]
    assert tokenizer.vocab_size == 6
    added["9"] = {"content": "<y>"}
    files = folder_of(tmp_path, tokenizer_config__json={"added_tokens_decoder": added})
    with pytest.raises(ModelError, match=r"gives '<y>' the id 9"):
        load_tokenizer(files)


def test_an_override_is_used(tmp_path):
    files = folder_of(tmp_path, tokenizer_config__json=CONFIG)
    other = ModelFiles("m", tmp_path / "nowhere", "safetensors", {}, {})
    assert load_tokenizer(other, override=str(tmp_path)).bos_token_id == 3
    path = str(files.path / "tokenizer.json")
    assert load_tokenizer(other, override=path).bos_token_id == 3
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(other, override=str(tmp_path / "no"))


def test_what_is_missing_or_broken_is_named(tmp_path):
    files = folder_of(tmp_path)
    with pytest.raises(ConfigError, match=r"--chat-template: .*none.jinja cannot be read"):
        load_tokenizer(files, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match=r"--chat-template .*is broken"):
        load_tokenizer(files, chat_template="{% if %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json is not valid JSON"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer.json is not a usable tokenizer"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(files)


@settings(max_examples=200, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(data=st.data())
def test_mutated_tokenizer_files_raise_model_errors_only(tmp_path, data):
    files = folder_of(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.sampled_from(b'0129{}[]",:aN-\x00\xff'))
    path.write_bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))])
    try:
        tokenizer = load_tokenizer(files)
    except ModelError:
        return
    assert isinstance(tokenizer.encode("ab"), list)
