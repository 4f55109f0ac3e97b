"""Inputs made from valid ones: bytes changed, cut, repeated and spliced, and values in JSON."""

from __future__ import annotations

import copy
import json
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

_NUMBERS: Final = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53,
                   2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip
_WORDS: Final = (b"\0", b"\xff", b"\r\n", b"\n\n", b"{", b"}", b"[", b"]", b'"', b",", b":", b"-1",
                 b"1e999", b"NaN", b"null", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
                 b"\xef\xbb\xbf")  # fmt: skip
VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 7, 100, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 0.5,
    -0.0, 1e-320, 1e308, "", "a", "0", "\0", "a" * 300, "<|im_end|>", "{{ x }}", "../../etc/passwd",
    "é\u2028💥", "\u202e", [], {}, [None], [[[]]], {"": {}}, {"a": 1}, [0] * 300, ["a"] * 40,
)  # fmt: skip
_MAX_GROWTH: Final = 4096


def mutated(
    rng: random.Random, seeds: Sequence[bytes], words: Sequence[bytes] = (), *, json_share: float
) -> bytes:
    """One of `seeds`, changed in one to many places; `json_share` of them within their JSON."""
    data = rng.choice(seeds)
    if rng.random() < json_share:
        try:
            value = json.loads(data)
        except ValueError:
            pass
        else:
            return json.dumps(changed_value(rng, value), ensure_ascii=rng.random() < 0.5).encode(
                "utf-8", "surrogatepass"
            )
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8, 30))):
        _change(rng, changed, seeds, words)
    return bytes(changed)


def _change(
    rng: random.Random, data: bytearray, seeds: Sequence[bytes], words: Sequence[bytes]
) -> None:
    # What decides is at the beginning of most formats.
    size = min(len(data), rng.choice((16, 64, 512, 1 << 30)))
    place = rng.randrange(size + 1)
    match rng.randrange(9):
        case 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        case 1 if size:
            data[place % size] ^= 1 << rng.randrange(8)
        case 2:
            del data[place : place + rng.choice((1, 2, 8, 100))]
        case 3:
            del data[place:]
        case 4:
            part = data[place : place + rng.randrange(1, 64)]
            data[place:place] = (part * rng.choice((1, 2, 50)))[:_MAX_GROWTH]
        case 5:
            data[place:place] = rng.choice((*_WORDS, *words))
        case 6:
            other = rng.choice(seeds)
            begin = rng.randrange(len(other) + 1)
            data[place:place] = other[begin : begin + rng.choice((4, 40, 400))]
        case 7:
            form = rng.choice(("<B", "<H", "<I", "<Q", ">H", ">I"))
            limit = 1 << 8 * struct.calcsize(form)
            number = struct.pack(form, rng.choice(_NUMBERS) % limit)
            data[place : place + len(number)] = number
        case _:
            data[place:place] = rng.randbytes(rng.randrange(1, 9))


def changed_value(rng: random.Random, value: Any) -> Any:
    """A copy with some of its parts replaced, removed, repeated or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return rng.choice(VALUES)
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
            case 3:
                del holder[key]
            case 4:
                other, at = rng.choice(places)
                holder[key] = copy.deepcopy(other[at]) if other is not holder else [holder[key]]
            case 5:
                for _ in range(rng.choice((1, 3, 70))):
                    holder[key] = rng.choice(([holder[key]], {"a": holder[key]}))
            case 6 if isinstance(holder[key], int | float):
                holder[key] = holder[key] * rng.choice((-1, 0, 2, 1000, 2**40, 0.1))
            case _ if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case _:
                holder[rng.choice((str(key) + "x", "type", "a" * 200))] = holder.pop(key)
    return value


def _places(value: Any) -> Any:
    """Each holder and key within."""
    stack = [value]
    while stack:
        holder = stack.pop()
        if isinstance(holder, dict):
            keys: Any = list(holder)
        elif isinstance(holder, list):
            keys = range(min(len(holder), 32))
        else:
            continue
        for key in keys:
            yield holder, key
            stack.append(holder[key])
