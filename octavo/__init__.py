"""Octavo serves large language models: the public names, each imported when first used.

>>> from octavo import LLM, SamplingParams
>>> LLM("demo://smollm2").generate("The capital of France is", SamplingParams(temperature=0.0))

Importing this costs nothing and needs no compiled extension, so that the router's and the
operator's images run without it. The first engine on the CPU needs it, and says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.async_engine import AsyncEngine
    from octavo_engine.core.beam_search import BeamSearchParams
    from octavo_engine.core.offline.llm import LLM
    from octavo_engine.core.offline.lora_request import LoRARequest
    from octavo_engine.core.offline.structured_output import structured_output
    from octavo_engine.state.sampling_params import RequestOutputKind, SamplingParams

    __version__: str

__all__ = [
    "LLM", "AsyncEngine", "BeamSearchParams", "EngineConfig", "LoRARequest", "RequestOutputKind",
    "SamplingParams", "__version__", "structured_output",
]  # fmt: skip

_HOMES = {
    "LLM": "octavo_engine.core.offline.llm",
    "AsyncEngine": "octavo_engine.core.async_engine",
    "BeamSearchParams": "octavo_engine.core.beam_search",
    "structured_output": "octavo_engine.core.offline.structured_output",
    "LoRARequest": "octavo_engine.core.offline.lora_request",
    "EngineConfig": "octavo_engine.config",
    "RequestOutputKind": "octavo_engine.state.sampling_params",
    "SamplingParams": "octavo_engine.state.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("octavo")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0+source"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
