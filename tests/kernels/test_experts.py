"""A mixture of experts in csrc: who is chosen, what it weighs, and the products in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels import reference
from tests.kernels.harness import ISAS, Recorder, pack, run_rows

COLS, WIDTH, EXPERTS = 40, 32, 6
RNG = np.random.default_rng(3)
GATE_UP = (RNG.standard_normal((EXPERTS, 2 * WIDTH, COLS)) / 6).astype(np.float32)
DOWN = (RNG.standard_normal((EXPERTS, COLS, WIDTH)) / 6).astype(np.float32)
ROUTER = RNG.standard_normal((EXPERTS, COLS)).astype(np.float32)


def random_rows(count: int) -> np.ndarray:
    """The same in each process, whichever tests ran before."""
    return np.random.default_rng(count).standard_normal((count, COLS)).astype(np.float32)


def moe(
    x: np.ndarray,
    *,
    router: np.ndarray = ROUTER,
    isa: str = "",
    threads: int = 1,
    top_k: int = 3,
    renormalise: bool = True,
    packings: tuple[str, str] = ("f32", "f32"),
    activation_bits: int = 16,
    **changes: Any,
) -> np.ndarray:
    team = _native.Team(threads, isa)
    options: dict[str, Any] = {
        "gate_up": tuple(pack(team, w, packings[0]) for w in GATE_UP),
        "down": tuple(pack(team, w, packings[1]) for w in DOWN),
        "top_k": top_k,
        "renormalise": renormalise,
        "activation": "silu",
    }

    def build(recorder: Recorder, src: int) -> int:
        scores = recorder.buffer(len(router))
        recorder.program.linear(scores, src, pack(team, router, "f32"))
        dst = recorder.buffer(COLS)
        room = {
            "gathered": recorder.buffer(top_k * COLS),
            "hidden": recorder.buffer(top_k * WIDTH),
            "results": recorder.buffer(top_k * COLS),
        }
        recorder.program.moe(dst, src, scores, **(room | options | changes))
        return dst

    return run_rows(team, x, build, activation_bits=activation_bits)


def expected(x: np.ndarray, top_k: int, renormalise: bool) -> np.ndarray:
    x = x.astype(np.float64)
    scores = x @ ROUTER.T
    masses = np.exp(scores - scores.max(1, keepdims=True))
    shares = masses / masses.sum(1, keepdims=True)
    out = np.zeros_like(x)
    for row in range(len(x)):
        chosen = np.argsort(-scores[row], kind="stable")[:top_k]
        total = shares[row, chosen].sum() if renormalise else 1.0
        for expert in chosen:
            left, right = np.split(GATE_UP[expert] @ x[row], 2)
            h = reference.activate("silu", left) * right
            out[row] += shares[row, expert] / total * (DOWN[expert] @ h)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("top_k", "renormalise"), [(1, True), (3, True), (3, False), (6, False)])
def test_the_best_experts_weigh_as_a_softmax_says(isa: str, top_k: int, renormalise: bool) -> None:
    x = random_rows(23)
    got = moe(x, isa=isa, top_k=top_k, renormalise=renormalise)
    np.testing.assert_allclose(got, expected(x, top_k, renormalise), rtol=1e-5, atol=2e-6)


def test_a_token_has_the_same_bits_in_any_company_on_any_machine() -> None:
    x = random_rows(67)
    together = moe(x)
    for isa in ISAS:
        np.testing.assert_array_equal(moe(x, isa=isa, threads=3), together)
    for rows in (slice(0, 1), slice(20, 23), slice(40, 67)):
        np.testing.assert_array_equal(moe(x[rows]), together[rows])


@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("packings", [("q8", "q8"), ("q4", "q4"), ("q4", "f32"), ("f32", "q8")])
def test_rows_that_are_quantised_once_for_all_workers_have_the_same_bits(
    packings: tuple[str, str], activation_bits: int
) -> None:
    """One token alone is quantised by each worker for itself; many share what each has made."""
    x = random_rows(41)
    options: dict[str, Any] = {"packings": packings, "activation_bits": activation_bits}
    together = moe(x, threads=3, **options)
    np.testing.assert_array_equal(moe(x, **options), together)
    for row in range(0, 41, 10):
        alone = moe(x[row : row + 1], top_k=3, **options)
        np.testing.assert_array_equal(alone, together[row : row + 1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_inputs_are_weighed_by_the_sigmoids_of_their_scores(isa: str, top_k: int) -> None:
    x = random_rows(23)
    scores = x.astype(np.float64) @ ROUTER.T
    truth = np.zeros(x.shape)
    for row in range(len(x)):
        for expert in np.argsort(-scores[row], kind="stable")[:top_k]:
            left, right = np.split(
                GATE_UP[expert] @ (x[row] / (1 + np.exp(-scores[row, expert]))), 2
            )
            truth[row] += DOWN[expert] @ (reference.activate("silu", left) * right)
    got = moe(
        x, isa=isa, threads=2, top_k=top_k, renormalise=False, is_sigmoid=True, weighs_inputs=True
    )
    np.testing.assert_allclose(got, truth, rtol=1e-5, atol=2e-6)


def test_of_equal_scores_the_first_expert_is_taken() -> None:
    x = random_rows(4)
    flat = np.zeros_like(ROUTER)
    left, right = np.split(x.astype(np.float64) @ GATE_UP[0].T, 2, axis=1)
    first = (reference.activate("silu", left) * right) @ DOWN[0].T
    np.testing.assert_allclose(moe(x, router=flat, top_k=1), first, rtol=1e-5, atol=2e-6)


def test_nan_stays_with_its_token() -> None:
    x = random_rows(5)
    clean = moe(x)
    x[2, 7] = np.nan
    got = moe(x)
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_what_does_not_fit_is_refused() -> None:
    x = np.ones((2, COLS), np.float32)
    team = _native.Team(1)
    weights = tuple(pack(team, w, "f32") for w in GATE_UP)

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            moe(x, **changes)

    refused("top_k is 7 of 6 experts", top_k=7)
    refused("6 gate_up and 2 down", down=weights[:2])
    refused("a down is 64 x 40; it must be 40 x 32", down=weights)
    refused(
        "is packed as q8, another one as f32", gate_up=(*weights[:5], pack(team, GATE_UP[5], "q8"))
    )
    refused("must be a multiple of 16", gate_up=tuple(pack(team, w[:40], "f32") for w in GATE_UP))
    refused("scores must have rows T of 6 columns of f32; it has 5", router=ROUTER[:5])
    refused("overlaps what it reads", hidden=0)
    refused("moe needs an activation", activation="")
