"""Which variants of its kernels Triton would compile on a GPU, seen in the interpreter.

A variant is what Triton's own cache is keyed by: constants, types, whether pointers lie at
multiples of 16 bytes, whether numbers are one or multiples of 16, and the launch's options.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from triton.runtime import interpreter

ALIGNMENT = 16


class Variants:
    """Launches are noted for as long as the patch lasts.

    Without `runs` nothing more is done at a launch, since the interpreter is slow, and which
    variants there are does not depend on what was computed: all that kernels were to write is zero.
    """

    def __init__(self, monkeypatch: Any, *, runs: bool = True) -> None:
        self.seen: set[tuple[Any, ...]] = set()
        if not runs:
            monkeypatch.setattr(torch, "empty", torch.zeros)
            monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
            monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        run = interpreter.InterpretedFunction.run

        def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            self.seen.add(variant(kernel, args, kwargs))
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs) if runs else None

        monkeypatch.setattr(interpreter.InterpretedFunction, "run", noted)

    def take(self) -> set[tuple[Any, ...]]:
        """Those since the last call."""
        seen, self.seen = self.seen, set()
        return seen


def variant(kernel: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    signature = inspect.signature(kernel.fn)
    named = {name: value for name, value in kwargs.items() if name in signature.parameters}
    options = sorted((name, value) for name, value in kwargs.items() if name not in named)
    plain = kernel.kwargs.get("do_not_specialize") or ()
    bound = signature.bind(*args, **named).arguments
    keys = []
    for name, value in bound.items():
        if signature.parameters[name].annotation == "tl.constexpr":
            keys.append((name, value))
        else:
            keys.append((name, _specialised(value, is_plain=name in plain)))
    return (kernel.fn.__qualname__, *keys, *options)


def _specialised(value: Any, *, is_plain: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    if is_plain:
        return "int"
    return "one" if value == 1 else ("int", value % ALIGNMENT == 0)
