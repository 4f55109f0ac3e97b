"""Finding an answer's token counts without parsing it: the `usage` object stands near its end.

The compiled twin (csrc/router/usage.cpp) finds the same.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, TypeAlias

# Within a string of JSON the quotes would be escaped, so text that an engine wrote cannot pose
# as this; what stands in it are numbers.
_USAGE: Final = b'"usage":'
_COUNT: Final = re.compile(rb'"(prompt|input|completion|output|cached)_tokens"\s*:\s*(\d{1,12})')
_MAX_BYTES: Final = 1024  # of the object


# Prompt, output and cached tokens: what a `Usage` is, and its compiled twin returns.
Counts: TypeAlias = tuple[int, int, int | None]


class PyUsage(NamedTuple):
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: not reported


NO_USAGE: Final = PyUsage()


def find_usage(answer: bytes) -> PyUsage:
    """The counts of the last usage object in it, zeros if there is none."""
    at = answer.rfind(_USAGE)
    if at < 0:
        return NO_USAGE
    prompt_tokens = output_tokens = 0
    cached_tokens = None
    for name, count in _COUNT.findall(answer, at, at + _MAX_BYTES):
        if name == b"cached":
            cached_tokens = int(count)
        elif name in (b"prompt", b"input"):
            prompt_tokens = int(count)
        else:
            output_tokens = int(count)
    return PyUsage(prompt_tokens, output_tokens, cached_tokens)
