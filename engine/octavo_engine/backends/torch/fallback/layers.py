"""What each attention layer of a transformers model is, as its own calls show in one forward pass.

Two attention implementations are registered with transformers: `PROBE` records the calls and
computes nothing, `PAGED` hands them to the step that is under way.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

PROBE, PAGED = "octavo_probe", "octavo_paged"

PROBE_TOKENS = 3
_FAR = 1 << 20  # a window is looked for so far back
_OTHER = 12_347  # added to a position: a window is the same there


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of a forward pass; the n-th call of each pass is of the same layer."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None  # tokens that a token sees, itself included; None: all before it
    soft_cap: float | None
    has_sinks: bool


class AttentionCalls(Protocol):
    """Who answers a forward pass's calls of the attention interface, in their order."""

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: Any
    ) -> Tensor:
        """q, k and v are [1, heads, T, columns]; the result is [1, T, q heads, columns of v]."""


_current: ContextVar[AttentionCalls] = ContextVar("octavo_attention_calls")


@contextmanager
def answered_by(calls: AttentionCalls) -> Iterator[None]:
    """Forward passes of the models with our implementations go to `calls` meanwhile."""
    token = _current.set(calls)
    try:
        yield
    finally:
        _current.reset(token)


def _interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **extra: Any
) -> tuple[Tensor, None]:
    return _current.get().attend(module, query, key, value, attention_mask, extra), None


def _probe_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
) -> Tensor:
    """A mask whose every entry is the window; 0: there is none. A slice of it says the same."""
    window = _window_of(mask_function) or 0
    return torch.full((1, 1, int(q_length), int(kv_length)), window, dtype=torch.int64)


def register_implementations() -> None:
    """With transformers, which looks them up by name. PAGED has no masks: layers know theirs."""
    AttentionInterface.register(PROBE, _interface)
    AttentionInterface.register(PAGED, _interface)
    AttentionMaskInterface.register(PROBE, _probe_mask)


def _window_of(mask_function: Callable[..., Any]) -> int | None:
    """How far back a token sees; raises ModelError where that depends on where it is."""
    found = set()
    for position in (_FAR, _FAR + _OTHER):
        distances = torch.arange(-8, _FAR + 1)
        zero = torch.zeros_like(distances)
        try:
            visible = mask_function(zero, zero, torch.tensor(position), position - distances)
        except Exception as error:  # a function of anything but places looks into its own tensors
            raise ModelError(f"an attention mask depends on more than places: {error}") from error
        seen = torch.as_tensor(visible).expand(len(distances)).tolist()
        if any(seen[:8]):
            raise ModelError("an attention mask lets tokens see later ones")
        past = seen[8:]
        count = past.index(False) if False in past else None
        if count is not None and any(past[count:]):
            raise ModelError("an attention mask is no window")
        found.add(count)
    if len(found) != 1:
        raise ModelError("an attention mask is cut at fixed places (chunked attention)")
    return found.pop()


class AttentionProbe:
    """Records the calls of one forward pass."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: Any
    ) -> Tensor:
        if q.shape[2] != PROBE_TOKENS or k.shape[2] != PROBE_TOKENS:
            raise ModelError(
                f"an attention layer ({type(module).__name__}) sees other than the text's tokens"
            )
        if getattr(module, "is_causal", True) is False or extra.get("is_causal") is False:
            raise ModelError(f"an attention layer ({type(module).__name__}) is not causal")
        scale = extra.get("scaling")
        self.calls.append(
            AttentionCall(
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                key_dim=k.shape[-1],
                value_dim=v.shape[-1],
                scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
                window=_window(mask, extra.get("sliding_window")),
                soft_cap=extra.get("softcap"),
                has_sinks=extra.get("s_aux") is not None,
            )
        )
        return v.new_zeros((1, q.shape[2], q.shape[1], v.shape[-1]))


def _window(mask: Tensor | None, given: Any) -> int | None:
    """The mask's, which all implementations obey; without one, what the call says."""
    if mask is None:
        return int(given) if given else None
    values = sorted(set(mask.flatten().tolist())) if mask.dtype == torch.int64 else []
    if len(values) != 1:
        raise ModelError("the model adds biases of its own to attention masks")
    return int(values[0]) or None
