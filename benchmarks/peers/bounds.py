"""What a machine could do at best in a scenario: each step as fast as it reads or multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.measure.batch_limits import batch_best
from octavo.measure.work import ModelWork, WorkStep
from octavo_engine.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.peers.run import Scenario, Standing
    from octavo.measure.machine_limits import MachineLimits
    from octavo_engine.config import Quantization

Bounds = dict[str, dict[str, float]]  # tokens a second, by form of weights and scenario


def bounds_of(
    standings: Sequence[Standing],
    scenarios: Sequence[Scenario],
    limits: MachineLimits,
    peers: Path,
    model: str,
) -> Bounds:
    """Of the forms in which Octavo took part; a form whose rate of multiplying is not known is
    bound by reading alone."""
    bounds: Bounds = {}
    for standing in standings:
        contender = standing.contender
        path = contender.model_path(peers, model)
        if not contender.is_ours or contender.form in bounds or path is None:
            continue
        is_8_bit = "--quantization" in contender.command
        quantization: Quantization = "int8" if is_8_bit else "auto"
        work = ModelWork.of_files(
            EngineConfig(model=str(path), device="cpu", quantization=quantization)
        )
        bounds[contender.form] = {one.name: best_rate(one, work, limits) for one in scenarios}
    return bounds


def best_rate(scenario: Scenario, work: ModelWork, limits: MachineLimits) -> float:
    """In the unit of `scenario.shown`."""
    match scenario.shown:
        case "tok_s":
            middle = scenario.input_len + scenario.output_len // 2
            return 1 / work.best_s(WorkStep.decode(1, middle), limits)
        case "prompt_tok_s":
            return scenario.input_len / work.best_s(WorkStep.prefill(scenario.input_len), limits)
        case _:
            best = batch_best(
                work,
                limits,
                count=scenario.num_requests,
                at_once=scenario.concurrency,
                input_len=scenario.input_len,
                output_len=scenario.output_len,
            )
            return scenario.num_requests * scenario.output_len / best.seconds
