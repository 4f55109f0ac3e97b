"""What the kubelet replaces in a container's arguments, and how to keep it from that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def literal(arguments: Iterable[str]) -> list[str]:
    """Written so that the container gets them as they are here: the kubelet puts a variable's value
    for $(NAME), and $ for $$."""
    return [argument.replace("$", "$$") for argument in arguments]
