"""How much a template may make and how long it may take, whatever it is made of.

A template is a program: it doubles a text at each turn of a loop, holds a list many times in
another one, or counts in loops that write nothing. So each operation that can make more than it was
given is measured before it runs, and each turn of a loop, call and filter looks at the clock.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from json import JSONEncoder
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final

from jinja2.exceptions import SecurityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MAX_VALUE: Final = 16 << 20  # characters of one value, or as much in items
MAX_COUNT: Final = 1 << 20  # that a filter takes as a number of items
MAX_BITS: Final = 4096  # of a number
MAX_DIGITS: Final = 64  # that one is rounded to
_ITEM: Final = 16  # what an item counts for, beside its text

_clock = threading.local()


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """For what this thread renders meanwhile."""
    _clock.ends_at = time.monotonic() + seconds
    try:
        yield
    finally:
        _clock.ends_at = None


def tick() -> None:
    """Raises SecurityError when the time is over."""
    ends_at = getattr(_clock, "ends_at", None)
    if ends_at is not None and time.monotonic() > ends_at:
        raise SecurityError("the template takes too long")


def check_size(value: Any, *, each: int = 0) -> None:
    """Of all that it holds, as often as it holds it; `each` more for each of its items. Raises
    SecurityError."""
    if isinstance(value, str):
        _check(len(value))
        return
    size = each * len(value) if isinstance(value, (list, tuple, dict)) else 0
    todo = [value]
    while todo:
        item = todo.pop()
        size += _ITEM
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            size += _ITEM * 2 * len(item)
            _check(size)
            todo += chain(item.keys(), item.values())
        elif isinstance(item, (list, tuple)):
            size += _ITEM * len(item)
            _check(size)
            todo += item
        _check(size)


def counted(items: Iterable[Any], *, each: int = 0) -> Iterator[Any]:
    """The same, for items that are not there yet."""
    size = 0
    for item in items:
        size += _ITEM + each + (len(item) if isinstance(item, str) else 0)
        _check(size)
        tick()
        yield item


def joined(texts: Iterable[str]) -> str:
    """Instead of `"".join`, which would take what it is given."""
    parts = list(texts)
    _check(sum(map(len, parts)))
    return "".join(parts)


def check_product(left: Any, right: Any) -> None:
    are_numbers = isinstance(left, int) and isinstance(right, int)
    if are_numbers and left.bit_length() + right.bit_length() > MAX_BITS:
        raise SecurityError("the template makes a number of too many digits")


def check_sum(left: Any, right: Any) -> None:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        weight = 1 if isinstance(left, str) else _ITEM
        _check(weight * (len(left) + len(right)))


def check_replacement(text: Any, old: Any, new: Any, *_: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old) if old else len(text) + 1
    _check(len(text) + times * len(new))


def check_method(method: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, of which those that are not there yet are counted when they come."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str):
        return args
    if name == "replace" and len(args) > 1:
        check_replacement(owner, *args)
    elif name == "join" and args:
        return (_measured(args[0], each=len(owner)), *args[1:])
    return args


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, within these bounds. What it wants of jinja2 comes as its first argument."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tick()
        head, value, rest = args[:skipped], args[skipped], args[skipped + 1 :]
        each = 0
        if name == "join":
            each = len(str(rest[0] if rest else kwargs.get("d", "")))
        elif name == "replace":
            check_replacement(
                value, *rest, *(kwargs[key] for key in ("old", "new") if key in kwargs)
            )
        elif name == "indent":
            width = rest[0] if rest else kwargs.get("width", 4)
            width = len(width) if isinstance(width, str) else int(width)
            _check(len(str(value)) + width * (str(value).count("\n") + 1))
        elif name in ("batch", "slice", "round"):
            _check_number(MAX_DIGITS if name == "round" else MAX_COUNT, (*rest, *kwargs.values()))
        result = function(*head, _measured(value, each=each), *rest, **kwargs)
        if isinstance(result, str):
            _check(len(result))
        return result

    return call


def encoded(value: Any, **how: Any) -> str:
    """As JSON. Raises SecurityError."""
    check_size(value)
    if how.get("indent") is None:
        return JSONEncoder(**how).encode(value)
    return joined(counted(JSONEncoder(**how).iterencode(value)))


def shown(value: Any) -> Any:
    """What the template writes: the text of a list has all that is in it."""
    if not isinstance(value, str):
        check_size(value)
    return value


def _measured(value: Any, *, each: int) -> Any:
    if isinstance(value, GeneratorType):
        return counted(value, each=each)
    check_size(value, each=each)
    return value


def _check_number(most: int, numbers: Iterable[Any]) -> None:
    for number in numbers:
        if isinstance(number, int) and abs(number) > most:
            raise SecurityError(f"the template uses the number {number} where {most} is the most")


def _check(size: int) -> None:
    if size > MAX_VALUE:
        raise SecurityError(f"the template makes a value of more than {MAX_VALUE} characters")
