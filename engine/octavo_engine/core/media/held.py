"""Media that clients gave a name to, so that they need not send it again."""

from __future__ import annotations

from collections import OrderedDict

from octavo_engine.errors import InvalidRequest

HELD_BYTES = 64 << 20
MAX_NAME_CHARS = 256


class HeldMedia:
    """Files as they were sent, by whose they are and the `uuid` they were sent with. The least
    recently used ones are given up."""

    def __init__(self, max_bytes: int = HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._files: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()

    def hold(self, owner: bytes, name: str, data: bytes) -> None:
        """In place of what had the name. A file that is larger than all there is room for is not
        held."""
        self._num_bytes -= len(self._files.pop((owner, name), b""))
        self._files[owner, name] = data
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes:
            _, given_up = self._files.popitem(last=False)
            self._num_bytes -= len(given_up)

    def find(self, owner: bytes, name: str, param: str) -> bytes:
        """Raises InvalidRequest that names `param`."""
        data = self._files.get((owner, name))
        if data is None:
            raise InvalidRequest(
                f"{param}: nothing is held under the uuid {name!r}: it was not sent to this server "
                "with it, or was given up for others; send the file again",
                param=param,
                code="media_not_held",
            )
        self._files.move_to_end((owner, name))
        return data
