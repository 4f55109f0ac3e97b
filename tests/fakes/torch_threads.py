"""torch with one thread: several wait for each other on a machine with other work, and cut a
product by their number."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def one_torch_thread() -> Iterator[None]:
    import torch  # which some environments lack: their tests are skipped

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
