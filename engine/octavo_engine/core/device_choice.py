"""Where `--device auto` computes: on a GPU that torch sees, if it refuses nothing of what the
settings and the model need; else on the CPU. One line in the log says which, and why.

What is refused is found by the very checks that end a start with `--device cuda`. Torch, whose
import takes seconds, is imported only where it is installed, a driver of a GPU is there, and
nothing is refused already.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from octavo_engine.backends.rank_devices import check_devices
from octavo_engine.backends.registry import check_device
from octavo_engine.core.build import check_speech
from octavo_engine.core.model_files import resolve
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.vision_config import read_media_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.torch.gpu_limits import Gpu
    from octavo_engine.config import EngineConfig
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.weights.source import ModelFiles

# Where drivers of GPUs leave a trace: NVIDIA's, on Jetson and in WSL too, and AMD's.
DRIVER_FILES = ("nvidia*", "nvhost-gpu", "dxg", "kfd")
GIB = 1 << 30

logger = logging.getLogger(__name__)


class DeviceChoice(NamedTuple):
    device: Literal["cpu", "cuda"]
    reason: str


class GpuMachine(Protocol):
    """What there is; what takes long comes last."""

    def lacks(self) -> str | None:
        """What is missing for any GPU, as far as files show; does not import torch."""

    def gpu(self) -> Gpu | None:
        """The first GPU that torch sees, after `lacks` was None."""


class Needs(Protocol):
    """What the settings and the model need."""

    def refused(self) -> str | None:
        """Why --device cuda refuses that; does not import torch."""

    def refused_by_kernels(self) -> str | None:
        """Why the kernels on the GPU do, after `gpu` gave one."""

    @property
    def weight_bytes(self) -> int:
        """Of the model's files; 0: it has none."""


def choose_device(machine: GpuMachine, needs: Needs) -> DeviceChoice:
    """Pure but for what it asks, in this order."""
    lacks = machine.lacks()
    if lacks is not None:
        return DeviceChoice("cpu", lacks)
    refused = needs.refused()
    if refused is not None:
        return DeviceChoice("cpu", f"--device cuda refuses this: {refused}")
    gpu = machine.gpu()
    if gpu is None:
        return DeviceChoice("cpu", "torch sees no GPU")
    refused = needs.refused_by_kernels()
    if refused is not None:
        return DeviceChoice("cpu", f"--device cuda refuses this: {refused}")
    if needs.weight_bytes > gpu.free_bytes:
        return DeviceChoice(
            "cpu",
            f"the weights take {needs.weight_bytes / GIB:.1f} GiB, and {gpu.name} has "
            f"{gpu.free_bytes / GIB:.1f} GiB of memory free",
        )
    return DeviceChoice("cuda", f"{gpu.name} with {gpu.free_bytes / GIB:.1f} GiB of memory free")


def settle_device(
    config: EngineConfig,
    files: ModelFiles | None = None,
    pooling: PoolingConfig | None = None,
    machine: GpuMachine | None = None,
) -> EngineConfig:
    """The same settings with `auto` decided, and the choice logged. Raises ModelError and
    ConfigError if the model cannot be found."""
    if config.device != "auto":
        return config
    machine = machine or ThisMachine()
    if files is None and machine.lacks() is None:
        files = resolve(config)
    choice = choose_device(machine, ModelNeeds(config, files, pooling))
    logger.info("--device auto chose %s: %s", choice.device, choice.reason)
    return config.replace(device=choice.device)


class ThisMachine:
    """The one that this process runs on."""

    def __init__(self, devices: Path = Path("/dev")) -> None:
        self._devices = devices

    def lacks(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        if not any(True for name in DRIVER_FILES for _ in self._devices.glob(name)):
            return f"there is no GPU: {self._devices} has no nvidia*, kfd or dxg"
        return None

    def gpu(self) -> Gpu | None:
        try:
            from octavo_engine.backends.torch.gpu_limits import see_gpu

            return see_gpu()
        except (
            ImportError,
            OSError,
            RuntimeError,
        ) as error:  # a torch, or a driver, that is broken
            logger.warning(
                "torch does not work here, so no GPU can be used", extra={"reason": str(error)}
            )
            return None


class NoNeeds:
    """Of no model in particular."""

    weight_bytes = 0

    def refused(self) -> str | None:
        return None

    def refused_by_kernels(self) -> str | None:
        return None


class ModelNeeds:
    """Of one model with its settings."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles | None, pooling: PoolingConfig | None
    ) -> None:
        self._config, self._files, self._pooling = config, files, pooling
        self._model: ModelConfig | PoolingConfig | None = pooling

    def refused(self) -> str | None:
        return _error_of(self._check)

    def refused_by_kernels(self) -> str | None:
        from octavo_engine.backends.torch.gpu_limits import check_kernels_on_gpu

        model, config = self._model, self._config.replace(device="cuda")
        assert model is not None, "refused() comes first"
        return _error_of(lambda: check_devices(config)) or _error_of(
            lambda: check_kernels_on_gpu(config, model)
        )

    @property
    def weight_bytes(self) -> int:
        """Of a rank, about."""
        if self._files is None or self._config.load_format == "dummy":
            return 0
        path = self._files.path
        files = path.glob("*.safetensors") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files) // self._config.num_ranks

    def _check(self) -> None:
        """Raises ConfigError and ModelError."""
        config, files = self._config.replace(device="cuda"), self._files
        if self._pooling is not None:
            from octavo_engine.backends.pooling_registry import check_pooling_device

            check_pooling_device(config)
            return
        check_speech(config, files)
        self._model = check_device(config, files)
        if self._model is None:
            raise ConfigError(
                "transformers computes this model, and on a GPU only if --device cuda is named"
            )
        assert files is not None, "checked above"
        media = None if files.kind == "gguf" else read_media_config(files.config)
        if media is not None and config.max_media_per_prompt(media.kind) != 0:
            raise ConfigError(
                f"{media.noun} are computed by --device cpu; with --limit-mm-per-prompt "
                f"{media.kind}=0 the GPU computes the text"
            )


def _error_of(check: Callable[[], None]) -> str | None:
    try:
        check()
    except (ConfigError, ModelError) as error:
        return str(error)
    return None
