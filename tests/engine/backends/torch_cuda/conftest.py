"""Triton's kernels run on the GPU where there is one, else in Triton's interpreter.

`OCTAVO_PRETEND_CUDA=1`: all tests meet a device that is pretended, see pretend.py.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.engine.backends.torch_cuda import pretend

if TYPE_CHECKING:
    from collections.abc import Iterator


def quicken() -> None:
    """The interpreter spends most of its time on itself. It turns Triton's language into its own
    for each function that a kernel calls, where once a launch is enough; what follows from a type
    it finds out for each value; and it computes each whole number twice for an assertion about
    overflows that it then leaves out."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    interpreter._patch_lang = lambda fn: patch(everything)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
        *args, **kwargs
    )

    find_dtype = interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def dtype_of(kind: Any) -> Any:
        if (found := dtypes.get(kind.name)) is None:
            found = dtypes[kind.name] = find_dtype(kind)
        return found

    interpreter._get_np_dtype = dtype_of
    open_tensor = language.tensor.__init__
    shapes: dict[str, Any] = {}

    def open_quickly(self: Any, handle: Any, type: Any) -> None:
        if (found := shapes.get(type.name)) is None:
            open_tensor(self, handle, type)
            shapes[type.name] = self.numel, self.shape, self.dtype
        else:
            self.handle, self.type = handle, type
            self.numel, self.shape, self.dtype = found

    language.tensor.__init__ = open_quickly
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


# Before a kernel is defined: a definition settles which of the two it is (and tests/conftest.py).
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    quicken()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A GPU that is not there."""
    torch.set_num_threads(1)
    pretend.install(monkeypatch)
    with pretend.Pretending():
        yield pretend.DEVICE


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    torch.set_num_threads(1)
    if os.environ.get("OCTAVO_PRETEND_CUDA") and not torch.cuda.is_available():
        pretended: torch.device = request.getfixturevalue("pretended")
        return pretended
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by BLAS, which rounds a row by its place; matrix units do not."""
    plain_sums = functools.partial(np.einsum, "ij,jk->ik")
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: plain_sums(a, b, dtype=dtype))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
