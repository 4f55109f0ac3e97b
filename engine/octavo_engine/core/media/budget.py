"""How many bytes the pictures of one request may still have, wherever they are read from."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_engine.errors import InvalidRequest


@dataclass(slots=True)
class ByteBudget:
    """Shared by the pictures of one request, which are read at the same time."""

    most: int
    used: int = 0

    @property
    def left(self) -> int:
        return self.most - self.used

    def check(self, count: int, param: str) -> None:
        """Raises InvalidRequest where `count` more are too many."""
        if count > self.left:
            raise InvalidRequest(
                f"{param}: the pictures of this request have more than {self.most} bytes; send "
                "fewer or smaller ones",
                param=param,
            )

    def take(self, count: int, param: str) -> None:
        """As `check`, and counts them."""
        self.check(count, param)
        self.used += count
