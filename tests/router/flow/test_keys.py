"""Keys from settings, environment and a file that changes."""

import os
from hashlib import sha256

import pytest

from octavo_router.config.settings import FlowConfig, KeyConfig
from octavo_router.errors import ConfigInvalid
from octavo_router.flow.keys import make_table
from octavo_router.flow.keys_file import KeysFile


def digest(key):
    return sha256(key.encode()).digest()


def test_a_key_may_come_from_three_places():
    table = make_table(
        [
            KeyConfig(tenant="a", key="one"),
            KeyConfig(tenant="b", key_env="B_KEY"),
            KeyConfig(tenant="c", sha256=digest("three").hex()),
        ],
        {"B_KEY": "two"},
    )
    assert {k: v.tenant for k, v in table.limits.items()} == {
        digest("one"): "a",
        digest("two"): "b",
        digest("three"): "c",
    }
    assert table.is_required


def test_no_keys_means_none_are_asked_for():
    assert not make_table([], {}).is_required


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (KeyConfig(tenant="a"), r"keys\[0\]: give one of key, key_env and sha256; got none"),
        (KeyConfig(key="x", key_env="Y"), "got key and key_env"),
        (KeyConfig(sha256="abc"), r"keys\[0\].sha256: must be 64 hexadecimal digits"),
        (KeyConfig(key_env="MISSING"), "the environment has no MISSING"),
    ],
)
def test_a_bad_entry_is_named(entry, problem):
    with pytest.raises(ConfigInvalid, match=problem):
        make_table([entry], {})


def test_the_same_key_twice_is_a_mistake():
    with pytest.raises(ConfigInvalid, match=r"keys\[1\]: the same key is there twice"):
        make_table([KeyConfig(key="x"), KeyConfig(sha256=digest("x").hex())], {})


def test_a_nameless_key_gets_a_name_that_does_not_betray_it():
    (limits,) = make_table([KeyConfig(key="secret")], {}).limits.values()
    assert limits.tenant == f"key-{digest('secret').hex()[:8]}"


def reread(keys):
    table = keys.refresh()
    assert table is not None, "the file has not changed"
    return table


def write(path, text, *, at):
    path.write_text(text)
    os.utime(path, ns=(at, at))


def test_a_file_is_read_again_when_it_changed(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, "keys: [{tenant: a, key: one}]", at=1)
    keys = KeysFile(FlowConfig(keys_file=str(path), keys=(KeyConfig(key="fixed"),)), {})
    assert set(keys.load().limits) == {digest("fixed"), digest("one")}
    assert keys.refresh() is None
    write(path, "keys: [{tenant: a, key: two}]", at=2)
    assert set(reread(keys).limits) == {digest("fixed"), digest("two")}
    assert keys.refresh() is None


def test_a_bad_file_changes_nothing_and_says_so_once(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, "keys: [{tenant: a, key: one}]", at=1)
    keys = KeysFile(FlowConfig(keys_file=str(path)), {})
    keys.load()
    write(path, "keys: [{tenant: a, kye: one}]", at=2)
    with pytest.raises(ConfigInvalid, match="did you mean 'key'"):
        keys.refresh()
    assert keys.refresh() is None
    write(path, "keys: [{tenant: a, key: three}]", at=3)
    assert set(reread(keys).limits) == {digest("three")}


def test_a_file_that_is_gone_lets_nobody_in(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, "keys: [{tenant: a, key: one}]", at=1)
    keys = KeysFile(FlowConfig(keys_file=str(path)), {})
    keys.load()
    path.unlink()
    table = reread(keys)
    assert table.limits == {}
    assert table.is_required
    assert keys.refresh() is None
    write(path, "keys: [{tenant: a, key: one}]", at=4)
    assert set(reread(keys).limits) == {digest("one")}


def test_at_start_the_file_must_be_there(tmp_path):
    keys = KeysFile(FlowConfig(keys_file=str(tmp_path / "none.yaml")), {})
    with pytest.raises(ConfigInvalid, match="No such file"):
        keys.load()


def test_an_empty_file_asks_for_keys_and_has_none(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, "", at=1)
    table = KeysFile(FlowConfig(keys_file=str(path)), {}).load()
    assert table.is_required
    assert table.limits == {}


@pytest.mark.parametrize("data", [b"\xff\xfe", b"keys: {", b"[1]", b"keys: 7", b"keys: [7]"])
def test_whatever_the_file_holds_the_error_is_ours(tmp_path, data):
    path = tmp_path / "keys.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigInvalid):
        KeysFile(FlowConfig(keys_file=str(path)), {}).load()
