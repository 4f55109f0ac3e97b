"""Progress on the terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def loading_bar(title: str, *, enabled: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Gives a function of (bytes done, bytes in all). Silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    shown = enabled and console.is_terminal
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(title, total=None, visible=False)  # until there is something
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


@contextmanager
def generation_bar(
    num_prompts: int, *, enabled: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Gives a function of (prompts done, tokens generated so far)."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("Prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    console = Console(stderr=True)
    shown = enabled and console.is_terminal
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("", total=num_prompts, tokens=0)
        yield lambda done, tokens: progress.update(task, completed=done, tokens=tokens)
