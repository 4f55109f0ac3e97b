"""Opens the endpoint picker, if what it needs is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from octavo_router.epp.picker import PickerParts
    from octavo_router.epp.server import EppServer


def make_server(parts: PickerParts) -> EppServer:
    """Raises ConfigInvalid where gRPC is not installed."""
    if find_spec("grpc") is None:
        raise ConfigInvalid(
            "epp.enabled",
            "the endpoint picker needs gRPC: pip install grpcio",
        )
    from octavo_router.epp.server import EppServer

    return EppServer(parts)
