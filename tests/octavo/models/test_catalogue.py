"""Short names: each has an address that can be parsed, and typing errors name what is near."""

from __future__ import annotations

import pytest

from octavo.models.catalogue import CHAT, EMBEDDING, catalogue, find_model, fitting_models
from octavo.models.library import parse_model_name
from octavo_engine.errors import ConfigError
from octavo_engine.weights.demo import DEMO_MODELS
from octavo_engine.weights.hub import parse_name

GB = 10**9


def test_every_entry_is_whole():
    for model in catalogue():
        assert model.kind in (CHAT, EMBEDDING)
        assert 0 < model.download < model.memory and model.context >= 512
        assert model.license and model.parameters
        scheme, _, location = model.uri.partition("://")
        if scheme == "demo":
            assert location in DEMO_MODELS and DEMO_MODELS[location].megabytes == model.download
        else:
            assert scheme == "hf" and parse_name(location).revision is None


def test_no_name_means_two_models():
    names = [name for model in catalogue() for name in model.names]
    assert len(names) == len(set(names)) and all(name == name.lower() for name in names)
    assert len({model.uri for model in catalogue()}) == len(catalogue())


def test_a_name_an_alias_and_an_address_are_the_same_model():
    entry = find_model("Qwen3")
    assert entry is not None and entry.name == "qwen3:0.6b"
    for text in ("qwen3", "QWEN3:0.6B", entry.uri, entry.uri.removeprefix("hf://")):
        assert parse_model_name(text).name == "qwen3:0.6b"


def test_other_models_are_named_by_their_addresses():
    name = parse_model_name("org/model@v1")
    assert (name.name, name.uri, name.entry) == ("org/model@v1", "hf://org/model@v1", None)
    assert parse_model_name("s3://bucket/model").uri == "s3://bucket/model"


@pytest.mark.parametrize(
    ("text", "hint"), [("smolm2", "did you mean smollm2?"), ("zzz", "octavo list --all")]
)
def test_an_unknown_name_is_refused_with_what_is_near(text, hint):
    with pytest.raises(ConfigError, match=text) as caught:
        parse_model_name(text)
    assert hint in str(caught.value)


def test_models_that_fit_need_no_account_and_leave_some_memory():
    assert fitting_models(100 * 10**6) == []
    assert [model.name for model in fitting_models(10**9)] == ["smollm2:135m"]
    found = fitting_models(20 * GB)
    assert [model.memory for model in found] == sorted((m.memory for m in found), reverse=True)
    assert all(model.memory <= 16_000 and not model.is_gated for model in found)
