"""The table of formats and backends in docs/weight-formats.md: up to date, and true to both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.measure.formats_page import BEGIN, CONFIGS, END, PAGE, table, written
from octavo.measure.weight_formats import BITS, DEVICE_BITS
from octavo_engine import _native
from octavo_engine.backends.native.packing import _AS_STORED
from octavo_engine.backends.torch import repack
from octavo_engine.weights.gguf_types import READABLE, TENSOR_TYPES
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import ModelFiles

ROOT = Path(__file__).parents[3]


def test_the_table_is_what_the_tables_of_code_make():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert BEGIN in page
    assert END in page
    assert page == written(page), "run python -m octavo.measure.formats_page"


def test_each_format_is_opened_and_each_type_has_a_row(tmp_path):
    save_file({"norm.weight": np.ones(4, np.float16)}, tmp_path / "model.safetensors")
    for config in CONFIGS.values():
        open_checkpoint(
            ModelFiles("m", tmp_path, "safetensors", {"quantization_config": config}, {})
        )
    assert table().count("\n| ") == len(CONFIGS) + len(READABLE) + 1  # and a rule


def test_a_gpu_keeps_the_types_that_it_repacks():
    assert DEVICE_BITS.keys() == repack.BLOCK_BYTES.keys()
    for kind, bits in DEVICE_BITS.items():
        assert bits == repack.BLOCK_BYTES[kind] * 8 / 32


@pytest.mark.parametrize("kind", sorted(_AS_STORED))
def test_bits_of_a_weight_are_those_of_its_packing(kind):
    packing = _AS_STORED[kind]
    of_file = {each.name: each for each in TENSOR_TYPES.values()}
    columns = 1 << 14  # so that a row's factor counts for nothing
    held = _native.Packed(16, columns, packing).nbytes * 8 / 16 / columns
    # Small scales of some types are whole bytes in memory.
    assert BITS[packing] == pytest.approx(held, rel=0.04)
    if kind in of_file:
        assert BITS[packing] == of_file[kind].bytes * 8 / of_file[kind].block
