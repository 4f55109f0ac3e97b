"""Safetensors: what is read, and what every broken promise of a header is answered with."""

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from octavo_engine.errors import ModelError
from octavo_engine.weights.safetensors import SafetensorsCheckpoint, SafetensorsFile


def packed(header, body=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refusal(path) -> str:
    with pytest.raises(ModelError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_tensors_are_views_of_the_file(tmp_path):
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file({"a.weight": weight, "b": np.ones(3, np.float16)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert set(checkpoint.names()) == {"a.weight", "b"}
    assert checkpoint.total_bytes == 24 + 6
    stored = checkpoint.read("a.weight", (2, 3))
    assert (stored.dtype, stored.shape, stored.row_map, stored.offset) == ("F32", (2, 3), None, 0.0)
    assert stored.data.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert not stored.data.flags.writeable
    assert not stored.data.flags.owndata


def test_missing_tensor_and_wrong_shape_name_file_and_tensor(tmp_path):
    save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    with pytest.raises(ModelError, match=r"tensor b is missing from .*"):
        checkpoint.read("b", (1,))
    with pytest.raises(ModelError, match=r"tensor a in .*model.safetensors has shape \[2, 3\]"):
        checkpoint.read("a", (3, 2))


def test_unreadable_dtype_is_refused_only_when_asked_for(tmp_path):
    save_file(
        {"ids": np.ones(2, np.int32), "w": np.ones(2, np.float32)}, tmp_path / "a.safetensors"
    )
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert checkpoint.read("w", (2,)).dtype == "F32"
    with pytest.raises(ModelError, match=r"tensor ids in .* has dtype I32; readable are F32"):
        checkpoint.read("ids", (2,))


def shards(tmp_path, weight_map):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "m-1.safetensors")
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "m-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return SafetensorsCheckpoint.open(tmp_path)


def test_shards_are_joined_by_their_index(tmp_path):
    checkpoint = shards(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    assert set(checkpoint.names()) == {"a", "b"}
    assert checkpoint.read("b", (2,)).data.tolist() == [0] * 8


@pytest.mark.parametrize(
    "shard",
    ["../m-1.safetensors", "/etc/x.safetensors", "a/m.safetensors", ".m.safetensors", "m.bin", 3],
)
def test_index_may_not_leave_the_folder(tmp_path, shard):
    with pytest.raises(ModelError, match="not the plain name"):
        shards(tmp_path, {"a": shard})


def test_index_that_names_what_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"m-3.safetensors is missing"):
        shards(tmp_path, {"a": "m-3.safetensors"})
    with pytest.raises(ModelError, match=r"tensor b is missing from .*m-1.safetensors"):
        shards(tmp_path, {"b": "m-1.safetensors"})


def test_all_files_that_a_download_left_out_are_named_at_once(tmp_path):
    index = {"a": "m-1.safetensors", "b": "m-3.safetensors", "c": "m-4.safetensors"}
    with pytest.raises(ModelError, match=r"lacks 2 of the 3 files that .*: m-3.*, m-4.*cut off"):
        shards(tmp_path, index)


def test_pickles_are_never_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=r"pickle .*convert them to safetensors"):
        SafetensorsCheckpoint.open(tmp_path)


def test_pickle_under_a_false_name_is_not_a_safetensors_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00\x8c\x02os")
    assert "not a safetensors file, or hostile" in refusal(path)


def test_empty_folder_has_no_weights(tmp_path):
    with pytest.raises(ModelError, match="has no weights"):
        SafetensorsCheckpoint.open(tmp_path)


BODY = b"\0" * 8
BROKEN = {
    "empty": (b"", "is empty"),
    "short": (b"1234", "has 4 bytes"),
    "huge header": (packed(b"{}", length=2**63), "hostile"),
    "cut header": (packed(b"{}", length=500), "is truncated: the header has 500 bytes"),
    "no JSON": (packed(b"{]"), "not a safetensors file"),
    "deep JSON": (packed(b"[" * 100_000), "not a safetensors file"),
    "no object": (packed(b"[]"), "not an object"),
    "entry twice": (packed(b'{"a": {}, "a": {}}'), "names a twice"),
    "entry no object": (packed({"a": 1}), "tensor a"),
    "unknown dtype": (packed({"a": entry("F31")}, BODY), "unknown dtype 'F31'"),
    "negative size": (packed({"a": entry(shape=(-2, -1))}, BODY), "not a list of sizes"),
    "bool size": (packed({"a": entry(shape=(True, 2))}, BODY), "not a list of sizes"),
    "offsets reversed": (packed({"a": entry(offsets=(8, 0))}, BODY), "not [begin, end]"),
    "offsets negative": (packed({"a": entry(offsets=(-8, 0))}, BODY), "not [begin, end]"),
    "wrong product": (packed({"a": entry(shape=(3,))}, BODY), "takes 12 bytes; its range has 8"),
    "overflow": (packed({"a": entry(shape=(2**63, 2**63))}, BODY), "its range has 8"),
    "cut body": (packed({"a": entry()}, b"\0" * 7), "is truncated: tensor a ends at byte 8"),
    "overlap": (
        packed({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12),
        "tensor b in",
    ),
    "gap": (packed({"a": entry(offsets=(8, 16))}, b"\0" * 16), "leaves a gap"),
    "trailing": (packed({"a": entry()}, b"\0" * 9), "1 bytes that belong to no tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_promises_are_named(tmp_path, case):
    content, message = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert message in refusal(path)


VALID = packed({"a": entry(), "b": entry("BF16", (2, 2), (8, 16))}, b"\1" * 16)


@settings(
    max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None
)
@given(data=st.data())
def test_mutated_files_raise_model_errors_only(tmp_path, data):
    mutated = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 6))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    mutated = mutated[: data.draw(st.integers(0, len(mutated)))]
    path = tmp_path / "model.safetensors"
    path.write_bytes(mutated)
    try:
        file = SafetensorsFile(path)
    except ModelError:
        return
    for name, found in file.entries.items():
        assert len(file.data(name)) == found.end - found.begin
