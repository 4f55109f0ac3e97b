"""What a machine can do at most, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Best of several rounds: noise only ever makes a machine look slower."""

    num_cores: int  # of the host
    read_gb_s: float  # all cores together
    gemm_gflop_s: dict[str, float]  # by float32, bf16, int8, fp8; what is unknown is missing
    device: str = ""  # a GPU's name: then the rates are its own

    @property
    def machine(self) -> str:
        return self.device or f"{self.num_cores} cores"

    def describe(self) -> str:
        peaks = ", ".join(f"{rate:.0f} {dtype}" for dtype, rate in self.gemm_gflop_s.items())
        return f"{self.machine}, {self.read_gb_s:.1f} GB/s read, GFLOP/s: {peaks}"
