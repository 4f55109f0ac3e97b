"""Prompts under way: which prefixes are requested right now, and where they are being computed.

A prefix that an endpoint is computing this moment is worth as much as one it holds: whoever comes
next finds it done. Its tokens are not in the residency index yet, so they are remembered here, from
placing to first token. Prefixes are known by their route keys at 4, 8, 16 … chunks and at their
end, so that a common prefix is found with a handful of dictionary look-ups; how long it is, the
keys of the last request then decide.

The same names count how many requests in flight share a prefix. That is how hot it is.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint

KEY_BYTES = 8
FIRST = 4  # chunks; a shorter common prefix is not worth remembering

# By number of inner names: cuts out the keys at 4, 8, 16 … chunks and the last one, in one call.
_CUTS = tuple(
    itemgetter(
        *(
            slice((FIRST << i) * KEY_BYTES - KEY_BYTES, (FIRST << i) * KEY_BYTES)
            for i in range(num)
        ),
        slice(-KEY_BYTES, None),
    )
    for num in range(1, 24)
)


def names_of(keys: bytes) -> tuple[bytes, ...]:
    """The keys at 4, 8, 16 … chunks and the last one, shortest prefix first."""
    if not keys:
        return ()
    num = ((len(keys) // KEY_BYTES - 1) // FIRST).bit_length()
    names: tuple[bytes, ...] = _CUTS[num - 1](keys) if num else (keys[-KEY_BYTES:],)
    return names


def num_inner(num_keys: int) -> int:
    """How many of 4, 8, 16 … chunks are fewer than all of them."""
    return ((num_keys - 1) // FIRST).bit_length() if num_keys else 0


class PyUnderway:
    """Counts by name; bounded by what is in flight. Hot path: once per request each."""

    def __init__(self) -> None:
        self.num_computing = 0  # prompts
        self._requests: dict[bytes, int] = {}
        self._computing: dict[bytes, dict[Endpoint, tuple[int, bytes]]] = {}

    def begin(self, names: Sequence[bytes]) -> None:
        """A request with these names is placed."""
        requests = self._requests
        for name in names:
            requests[name] = requests.get(name, 0) + 1

    def end(self, names: Sequence[bytes]) -> None:
        """It is over."""
        requests = self._requests
        for name in names:
            left = requests[name] - 1
            if left:
                requests[name] = left
            else:
                del requests[name]

    def compute(self, names: Sequence[bytes], keys: bytes, endpoint: Endpoint) -> None:
        """The endpoint computes this prompt from now on, until `computed`."""
        self.num_computing += 1
        computing = self._computing
        for name in names:
            there = computing.get(name)
            if there is None:
                computing[name] = {endpoint: (1, keys)}
            else:
                known = there.get(endpoint)
                there[endpoint] = (1 if known is None else known[0] + 1, keys)

    def computed(self, names: Sequence[bytes], endpoint: Endpoint) -> None:
        """It has, or never will."""
        self.num_computing -= 1
        computing = self._computing
        for name in names:
            there = computing[name]
            count, keys = there[endpoint]
            if count > 1:
                there[endpoint] = (count - 1, keys)
            elif len(there) > 1:
                del there[endpoint]
            else:
                del computing[name]

    def sharers(self, name: bytes) -> int:
        """Requests in flight whose prompts begin like the one with this name."""
        return self._requests.get(name, 0)

    def credit(
        self,
        names: Sequence[bytes],
        keys: bytes,
        endpoints: Sequence[Endpoint],
        matched: list[int],
        tokens_per_key: float,
    ) -> None:
        """Raise `matched` to what is being computed at each endpoint."""
        computing = self._computing
        if names[0] not in computing:  # nobody begins like this: the usual case
            return
        credited: set[Endpoint] = set()
        for at in range(len(names) - 1, -1, -1):  # longest first; each endpoint's first counts
            there = computing.get(names[at])
            if there is None:
                continue
            for endpoint, (_, other_keys) in there.items():
                if endpoint in credited:
                    continue
                credited.add(endpoint)
                for i, candidate in enumerate(endpoints):
                    if candidate is endpoint:
                        tokens = int(num_common(keys, other_keys) * tokens_per_key)
                        if matched[i] < tokens:
                            matched[i] = tokens
                        break
            if len(credited) >= len(endpoints):
                return


def num_common(keys: bytes, other: bytes) -> int:
    """Leading keys that two prompts share. A key names all before it, so halving finds the end."""
    low, high = 0, min(len(keys), len(other)) // KEY_BYTES
    end = high * KEY_BYTES
    if keys[end - KEY_BYTES : end] == other[end - KEY_BYTES : end]:
        return high
    while low < high:
        middle = (low + high) // 2
        end = middle * KEY_BYTES + KEY_BYTES
        if keys[end - KEY_BYTES : end] == other[end - KEY_BYTES : end]:
            low = middle + 1
        else:
            high = middle
    return low
