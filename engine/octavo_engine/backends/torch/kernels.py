"""The kernels that a step on a device is made of, as a seam: plain torch or Triton answer to it."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Protocol

import torch

from octavo_engine.backends.torch.flashinfer import FlashInferAttention, choose_attention
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.torch.cuda_loader import DeviceLinear
    from octavo_engine.backends.torch.device_adapters import Arenas, DeviceSite
    from octavo_engine.backends.torch.device_step import DeviceStep, DrawParams, WalkCut
    from octavo_engine.backends.torch.head_shape import HeadShape
    from octavo_engine.backends.torch.operands import (
        ExpertPair,
        LatentOperands,
        LayerKV,
        PageMoves,
    )
    from octavo_engine.backends.torch.packed import Format
    from octavo_engine.backends.torch.scans import ScanKernels
    from octavo_engine.config import AttentionBackend, KernelChoice
    from octavo_engine.models.config import ExpertsConfig
    from octavo_engine.models.latent_config import LatentConfig
    from octavo_engine.ops import Activation, AttentionSpec, ExpertsSpec, LatentAttentionSpec

# Triton's matrix instructions for 16-bit floats begin here.
MIN_CAPABILITY = (8, 0)

logger = logging.getLogger(__name__)


class Kernels(Protocol):
    """Everything of a step but what torch itself is best at."""

    @property
    def name(self) -> str: ...

    @property
    def scans(self) -> ScanKernels:
        """What goes on from token to token, of models with recurrent states."""

    @property
    def can_capture(self) -> bool:
        """Whether a step launches the same work whatever its values are: a graph may hold it."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits are the same in all company."""

    @property
    def can_capture_prompts(self) -> bool:
        """The same of steps that hold parts of prompts."""

    @property
    def has_one_table(self) -> bool:
        """Whether all layers must find their blocks in one table."""

    @property
    def formats(self) -> frozenset[Format]:
        """The quantised weights that products take as they are stored."""

    @property
    def reads_scales(self) -> bool:
        """Whether attention reads a cache in eight bits."""

    def workspace_bytes(self, limits: BackendLimits) -> int:
        """The most that attention takes beside its operands and results, in the largest step."""

    def wide_tokens(self, experts: ExpertsConfig) -> int:
        """From how many tokens on experts have wide tiles; 0: there are no tiles."""

    @property
    def long_tokens(self) -> int:
        """From how many tokens on prompts are attended to in a way of their own; 0: never."""

    @property
    def walks(self) -> WalkCut:
        """How attention of single tokens is cut."""

    @property
    def tokens_per_tile(self) -> int:
        """How many of a sequence's tokens one attention program takes in a step with prompts."""

    def walks_few(self, width: int) -> bool:
        """Whether contexts are walked for up to `width` tokens of a sequence at once, too."""

    def few_bytes(self, num_tokens: int, width: int) -> int:
        """As `workspace_bytes`, of the largest step of a few tokens for each sequence."""

    def linear(self, x: Tensor, weight: DeviceLinear) -> Tensor:
        """x · weightᵀ + bias, in x's dtype; of the head in float32."""

    def add_adapters(
        self, y: Tensor, x: Tensor, site: DeviceSite, arenas: Arenas, step: DeviceStep
    ) -> None:
        """Add to the linear layer's results what each row's adapter makes of x. Other rows stay as
        they are."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, y: Tensor, scale: float, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """(x + scale * y in x's dtype, its norm)."""

    def experts(self, x: Tensor, scores: Tensor, layers: ExpertPair, spec: ExpertsSpec) -> Tensor:
        """As `Ops.experts`, in x's dtype."""

    def glu(self, x: Tensor, activation: Activation) -> Tensor: ...

    def turn_and_store(
        self, qkv: Tensor, angles: Tensor | None, kv: LayerKV, step: DeviceStep, spec: AttentionSpec
    ) -> Tensor:
        """Norm and rotate q and k, write k and v to the cache; gives q."""

    def attend(self, q: Tensor, kv: LayerKV, step: DeviceStep, spec: AttentionSpec) -> Tensor: ...

    def latent_attention(
        self, operands: LatentOperands, step: DeviceStep, spec: LatentAttentionSpec
    ) -> Tensor:
        """As `LatentOps.latent_attention`."""

    def move_pages(
        self, staging: Tensor, region: Tensor, moves: PageMoves, *, is_save: bool
    ) -> None:
        """Blocks of a region of the KV cache (`DeviceKV.regions`) into slots of `staging`, or
        back; int32 both."""

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        """Tokens and statuses, [2, S] int32; the tokens are kept for a step that awaits them."""


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    shape: HeadShape,
    *,
    choice: KernelChoice = "auto",
    attention: AttentionBackend = "auto",
    batch_invariant: bool = False,
    latent: LatentConfig | None = None,
) -> Kernels:
    """What suits the device; logs it with the reason. Raises ConfigError if a choice cannot be.
    `latent`: of a model whose attention is."""
    name, reason = settle_kernels(device, choice)
    logger.info("Chose %s kernels on %s: %s", name, device, reason)
    if name == "plain":
        if batch_invariant:
            raise ConfigError(f"batch-invariant results need the Triton kernels; {reason}")
        if attention != "auto":
            raise ConfigError(
                f"--attention-backend {attention} goes with the Triton kernels; {reason}"
            )
        from octavo_engine.backends.torch.plain import PlainKernels

        return PlainKernels()
    from octavo_engine.backends.torch.triton_kernels import TritonKernels

    attends = choose_attention(attention, dtype, shape, batch_invariant=batch_invariant)
    logger.info("Chose %s for attention: %s", attends.name, attends.reason)
    prompts = FlashInferAttention(device) if attends.name == "flashinfer" else None
    return TritonKernels(
        device, dtype, shape,
        batch_invariant=batch_invariant, prompts=prompts, latent=latent,
    )  # fmt: skip


def settle_kernels(device: torch.device, choice: KernelChoice) -> tuple[str, str]:
    """Their name, and why. Raises ConfigError if a choice cannot be."""
    if choice == "plain":
        return "plain", "requested"
    has_triton = importlib.util.find_spec("triton") is not None
    if choice == "triton":
        if not has_triton:
            raise ConfigError("the Triton kernels need the package triton: pip install triton")
        return "triton", "requested"
    if device.type != "cuda":
        return "plain", f"Triton compiles for GPUs, not for {device.type}"
    if not has_triton:
        return "plain", "triton is not installed (pip install triton)"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "plain", f"the device is older than compute capability {MIN_CAPABILITY}"
    return "triton", "triton is installed and the device can run it"
