"""Devices beside NVIDIA's and AMD's that torch knows: each a small value, or somebody's plug-in.

A plug-in is an entry point of the group `octavo.platforms`: a function without arguments that gives
a Platform. All of them run the plain kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from octavo_engine.backends.torch.memory import DeviceMemory
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = "octavo.platforms"


class Platform(Protocol):
    """A kind of device. Called in this order: `problem`, `device`, then the others."""

    @property
    def name(self) -> str:
        """As --platform says it."""

    def problem(self) -> str | None:
        """What is missing here; None if it can be used."""

    def device(self) -> torch.device: ...

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether it computes in this dtype."""

    def memory(self) -> DeviceMemory | None:
        """None if the device does not say."""


@dataclass(frozen=True, slots=True)
class TorchPlatform:
    """A device whose package gives torch a module of its name, as `torch.xpu` is."""

    name: str
    package: str | None  # to import; None: part of torch

    def problem(self) -> str | None:
        if self.package is not None:
            if importlib.util.find_spec(self.package.partition(".")[0]) is None:
                return f"the package {self.package.partition('.')[0]} is not installed"
            importlib.import_module(self.package)
        module = self._module()
        if module is None or not module.is_available():
            return f"torch sees no device of type {self.name}"
        return None

    def device(self) -> torch.device:
        return torch.device(self.name, 0)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def memory(self) -> DeviceMemory | None:
        ask = getattr(self._module(), "mem_get_info", None)
        return None if ask is None else DeviceMemory(*ask())

    def _module(self) -> Any:  # each package's own
        return getattr(torch, self.name, None)


@dataclass(frozen=True, slots=True)
class XlaPlatform:
    """TPUs, through torch_xla."""

    name: str = "tpu"

    def problem(self) -> str | None:
        if importlib.util.find_spec("torch_xla") is None:
            return "the package torch_xla is not installed"
        return None

    def device(self) -> torch.device:
        device: torch.device = importlib.import_module("torch_xla").device()
        return device

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16)

    def memory(self) -> DeviceMemory | None:
        return None


def find_platform(name: str | None) -> Platform:
    """By name, ready to be used; a plug-in goes before one of ours. Raises ConfigError."""
    makers = _makers()
    if name not in makers:
        raise ConfigError(
            f"--device plugin needs --platform with one of {', '.join(sorted(makers))}; got {name}"
        )
    platform = makers[name]()
    problem = platform.problem()
    if problem is not None:
        raise ConfigError(f"--platform {name} cannot be used here: {problem}")
    return platform


def _makers() -> dict[str, Callable[[], Platform]]:
    ours: dict[str, Callable[[], Platform]] = {
        "xpu": lambda: TorchPlatform("xpu", None),
        "hpu": lambda: TorchPlatform("hpu", "habana_frameworks.torch.core"),
        "npu": lambda: TorchPlatform("npu", "torch_npu"),
        "tpu": XlaPlatform,
    }
    plugins = {entry.name: _loaded(entry) for entry in importlib.metadata.entry_points(group=GROUP)}
    return ours | plugins


def _loaded(entry: importlib.metadata.EntryPoint) -> Callable[[], Platform]:
    """Its package is imported when the platform is chosen, not when it is listed."""

    def make() -> Platform:
        platform: Platform = entry.load()()
        return platform

    return make
