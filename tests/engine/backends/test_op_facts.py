"""What a profile says of operations: names that tell them apart, true sizes, speeds from times."""

from __future__ import annotations

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.native import graph as g
from octavo_engine.backends.native.facts import OpFacts, described, facts_of, timed

X = g.Value(0, 64)
OUT = g.Value(1, 32, rows="S")


def test_a_product_is_named_by_its_shape_and_what_follows_it():
    weight = _native.Packed(32, 64, "bf16")
    plain = g.Linear(OUT, X, g.NativeLinear(weight))
    onto = g.Linear(OUT, X, g.NativeLinear(weight), activation="silu", onto=OUT)
    gated = g.Linear(OUT, X, g.NativeLinear(weight), glu="silu")
    facts = facts_of([plain, onto, gated])
    assert [each.name for each in facts] == [
        "linear 64→32 bf16", "linear 64→32 bf16 + silu + add", "linear 64→32 bf16 + glu",
    ]  # fmt: skip
    assert facts[0] == OpFacts("linear 64→32 bf16", "S", weight.nbytes, 2 * 64 * 32)


def test_every_instruction_has_a_name():
    norm = g.RmsNorm(X, X, np.ones(64, np.float32), 1e-6, add=X)
    others: list[g.Instruction] = [
        norm, g.Glu(X, X, "silu"), g.Activate(X, X, "gelu"), g.Add(X, X, X, 1.0),
        g.Scale(X, X, 2.0), g.SoftCap(X, X, 5.0), g.Convert(X, X), g.SelectRows(OUT, X),
        g.GateNode(X, X, X),
    ]  # fmt: skip
    names = [each.name for each in facts_of(others)]
    assert names == ["rms_norm + add", "glu", "activation", "add", "scale", "soft_cap", "convert",
                     "select_rows", "gate"]  # fmt: skip


def test_times_become_slices_and_speeds():
    facts = [OpFacts("a", "T", 4000, 100), OpFacts("b", "S"), OpFacts("c", "S")]
    slices = list(timed(facts, np.array([1000, 3000, 0, 4000]), 5, 2))
    assert slices == [
        ("a", 1000, 3000, {"rows": 5, "weight_bytes": 4000, "GB/s": 2.0, "flops": 500,
                           "GFLOP/s": 0.2}),
        ("c", 3000, 4000, {"rows": 2}),
    ]  # fmt: skip
    assert described(facts[0], 1, 0.0)["GB/s"] is None  # a clock may not have moved
