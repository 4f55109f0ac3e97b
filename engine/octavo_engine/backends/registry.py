"""From the engine's settings to a backend that holds the model; imports only the one it builds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from octavo_engine.backends.adapters import AdapterLimits
from octavo_engine.backends.alignment import alignment_heads
from octavo_engine.backends.draft_files import check_draft_device, open_draft, open_weights
from octavo_engine.backends.draft_head_files import open_draft_head
from octavo_engine.backends.draft_sources import DraftSources
from octavo_engine.backends.head_files import open_heads
from octavo_engine.backends.native.shard import Shard, cut_heads
from octavo_engine.backends.rank_devices import shares_gpu
from octavo_engine.backends.vision_part import media_part
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.implementation import implementation_of
from octavo_engine.models.vision_config import read_media_config
from octavo_engine.weights.open import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import Backend, GathersSteps
    from octavo_engine.backends.media import TakesMedia
    from octavo_engine.backends.native.backend import NativeBackend
    from octavo_engine.backends.native.graph import Dtype, Graph
    from octavo_engine.backends.native.shard import RankPlace
    from octavo_engine.backends.native.stages import StagePlace
    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.source import ModelFiles


def build_backend(
    config: EngineConfig,
    files: ModelFiles | None,
    progress: Callable[[int, int], None] | None = None,
    peers: RankPlace | None = None,
) -> Backend:
    """The backend that `config.device` names; reads the weights, which takes the time it takes.

    `progress(bytes_done, bytes_total)` follows it. With `peers` it has some of the experts. Raises
    ModelError and ConfigError.
    """
    model = check_device(config, files, None if peers is None else peers.shard.size)
    if config.device == "sim":
        from octavo_engine.backends.sim.backend import SimBackend
        from octavo_engine.backends.sim.stages import SimStages

        return SimStages(config) if config.pipeline_parallel_size > 1 else SimBackend(config)
    assert files is not None, "checked above"
    if model is None:
        return _build_transformers(config, files)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if config.device == "torch":
        return _build_torch(config, model, files, max_model_len=max_model_len, progress=progress)
    if config.device in ("cuda", "plugin"):
        return _build_cuda(config, model, files, max_model_len=max_model_len, progress=progress)
    return _build_native(
        config, model, files, max_model_len=max_model_len, progress=progress, peers=peers
    )


def check_device(
    config: EngineConfig, files: ModelFiles | None, num_cores: int | None = None
) -> ModelConfig | None:
    """What the settings and the model need of the device that is named; reads no weights.

    Returns the model; None of one that transformers computes, and of the simulator. Raises
    ConfigError and ModelError where the device does not compute it.
    """
    _check_kv_cache_dtype(config)
    check_activation_bits(config)
    check_draft_device(config)
    if config.device == "sim":
        return None
    if files is None:
        raise ConfigError(f"--device {config.device} needs a model")
    if implementation_of(config, files.config, is_gguf=files.gguf is not None) == "transformers":
        check_draft_device(config, is_fallback=True)
        if config.enable_expert_parallel:
            raise ConfigError(
                "--enable-expert-parallel is for models that octavo computes itself, and this one "
                "is computed by transformers; leave it out"
            )
        return None
    model = ModelConfig.from_hf(files.config)
    _check_states(config, model)
    _check_experts(config, model, num_cores)
    _check_gathering(config, model)
    if config.quantization in ("int8", "int4") and config.device not in ("auto", "cpu"):
        raise ConfigError(
            f"--quantization {config.quantization} is computed by --device cpu only; "
            f"--device {config.device} takes auto or none"
        )
    return model


def build_rank(
    config: EngineConfig,
    files: ModelFiles,
    place: RankPlace | None = None,
    stage: StagePlace | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NativeBackend:
    """One of several ranks, with its part of the weights: of each layer, by its place, or some
    layers, as its stage. Raises ModelError and ConfigError."""
    _check_kv_cache_dtype(config)
    check_activation_bits(config)
    model = ModelConfig.from_hf(files.config)
    _check_states(config, model)
    _check_experts(config, model)
    max_model_len = config.max_model_len or model.max_position_embeddings
    return _build_native(
        config,
        model,
        files,
        max_model_len=max_model_len,
        progress=progress,
        place=place,
        stage=stage,
    )


def build_gathering_rank(
    config: EngineConfig,
    files: ModelFiles,
    place: RankPlace,
    progress: Callable[[int, int], None] | None = None,
) -> GathersSteps:
    """One of several ranks of --device cuda or torch, with its part of each layer. Raises
    ModelError and ConfigError."""
    model = check_device(config, files)
    assert model is not None, "transformers has no ranks"
    max_model_len = config.max_model_len or model.max_position_embeddings
    build = _build_cuda if config.device == "cuda" else _build_torch
    backend = build(
        config, model, files, max_model_len=max_model_len, progress=progress, place=place
    )
    return cast("GathersSteps", backend)


def whole_graph(config: EngineConfig, files: ModelFiles) -> tuple[Graph, int]:
    """A model as it is before it is cut into stages, without its matrices, and how many layers it
    has. Raises ModelError and ConfigError."""
    from octavo_engine.backends.native.backend import record_whole
    from octavo_engine.backends.native.placement import make_team

    model = ModelConfig.from_hf(files.config)
    length = config.max_model_len or model.max_position_embeddings
    dtype: Dtype = "f32" if config.dtype == "float32" else "bf16"
    weights = open_weights(config, model, files)
    return record_whole(model, weights, make_team(1), dtype, length), model.num_layers


def _check_kv_cache_dtype(config: EngineConfig) -> None:
    requested, device = config.kv_cache_dtype, config.device
    if requested in ("auto", config.dtype) or device in ("auto", "cpu", "cuda"):
        return  # a GPU's backend knows what its kernels read
    raise ConfigError(
        f"--kv-cache-dtype {requested} is computed by --device cpu and cuda only; --device "
        f"{device} takes auto, or what --dtype names"
    )


def _check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError where residuals of streams, or recurrent states, are not computed."""
    if model.streams is not None:
        what = f"{model.architecture} has a residual of several streams, which"
    elif model.recurrent is not None:
        what = f"{model.architecture} has layers with recurrent states, which"
    else:
        return
    if model.streams is not None and config.device in ("cuda", "plugin"):
        raise ConfigError(f"{what} --device {config.device} does not compute yet: use --device cpu")
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"{what} --tensor-parallel-size {config.tensor_parallel_size} cannot divide yet: "
            "leave it out"
        )


def _check_gathering(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for what ranks of the torch backends do not divide."""
    if config.num_ranks == 1 or config.device not in ("cuda", "torch"):
        return
    cut_heads(model.num_heads, model.num_kv_heads, Shard(0, config.tensor_parallel_size))
    for what, is_there in (
        ("mixtures of experts", model.experts is not None),
        ("latent attention", model.latent is not None),
        ("LoRA adapters (--enable-lora)", config.enable_lora),
        ("a KV cache in several tiers", config.has_kv_tiers or config.kv_transfer is not None),
    ):
        if is_there:
            raise ConfigError(
                f"{what} cannot be divided between ranks on --device {config.device} yet: leave "
                f"{config.ranks_flag} out, or use --device cpu"
            )


def _check_experts(config: EngineConfig, model: ModelConfig, num_cores: int | None = None) -> None:
    """Raises ConfigError where there is not an expert for each rank, or each core, or none to
    count."""
    if config.expert_metrics and model.experts is None:
        raise ConfigError(
            "--expert-metrics counts the experts of mixtures, and this model, "
            f"{model.architecture}, has none; leave it out"
        )
    if not config.enable_expert_parallel:
        return
    if model.experts is None:
        raise ConfigError(
            "--enable-expert-parallel is for mixtures of experts, and this model, "
            f"{model.architecture}, has none; leave it out"
        )
    count, size = model.experts.num_experts, num_cores or config.tensor_parallel_size
    if size > count:
        flag = "--data-parallel-size" if num_cores else "--tensor-parallel-size"
        raise ConfigError(
            f"--enable-expert-parallel has {count} experts for {size} ranks; lower "
            f"{flag} to {count}, or leave it out"
        )
    most = count * (size - 1)
    if size > 1 and config.eplb is not None and config.eplb.num_redundant_experts > most:
        raise ConfigError(
            f"--eplb-config: num_redundant_experts must be at most {most}, with which each of "
            f"{size} ranks has all {count} experts; got {config.eplb.num_redundant_experts}"
        )


def _adapter_limits(config: EngineConfig) -> AdapterLimits | None:
    return AdapterLimits(config.max_loras, config.max_lora_rank) if config.enable_lora else None


def check_activation_bits(config: EngineConfig) -> None:
    """Raises ConfigError where they are requested and nothing would come of it."""
    if config.activation_bits == 16:
        return
    if config.device not in ("auto", "cpu"):
        raise ConfigError(
            f"--activation-bits {config.activation_bits} is computed by --device cpu only; "
            f"leave it out on --device {config.device}"
        )
    if config.quantization == "none":
        raise ConfigError(
            f"--activation-bits {config.activation_bits} is for weights held as integers, and "
            "--quantization none holds none so: leave one of them out"
        )


def _build_native(
    config: EngineConfig,
    model: ModelConfig,
    files: ModelFiles,
    *,
    max_model_len: int,
    progress: Callable[[int, int], None] | None,
    place: RankPlace | None = None,
    peers: RankPlace | None = None,
    stage: StagePlace | None = None,
) -> NativeBackend:
    if config.dtype == "float16":
        raise ConfigError(
            "--dtype float16 is not available on this device; use bfloat16, float32 or auto"
        )
    from octavo_engine.backends.native.backend import NativeBackend

    backend = NativeBackend(
        model,
        open_weights(config, model, files),
        max_model_len=max_model_len,
        dtype="f32" if config.dtype == "float32" else "bf16",
        quantization=config.quantization,
        activation_bits=config.activation_bits,
        kv_cache_dtype=config.kv_cache_dtype,
        num_threads=config.num_threads,
        adapters=_adapter_limits(config),
        progress=progress,
        place=place,
        spreads_experts=config.enable_expert_parallel,
        peers=peers,
        eplb=config.eplb,
        stage=stage,
        draft=open_draft(config, model),
        heads=open_heads(config, model),
        draft_head=open_draft_head(config, model, files),
    )
    if place is None and stage is None:
        _load_media(config, files, backend)
    backend.align_by(alignment_heads(files, model))
    return backend


def _build_torch(
    config: EngineConfig,
    model: ModelConfig,
    files: ModelFiles,
    *,
    max_model_len: int,
    progress: Callable[[int, int], None] | None,
    place: RankPlace | None = None,
) -> Backend:
    try:
        import torch
    except ImportError as error:
        raise ConfigError("--device torch needs torch: pip install torch") from error
    from octavo_engine.backends.torch.backend import TorchBackend
    from octavo_engine.backends.torch.precision import Precision

    if place is not None:  # the threads are of all ranks together
        num_threads = config.num_threads or torch.get_num_threads()
        torch.set_num_threads(max(1, num_threads // place.shard.size))
    # The reference computes in float32 whatever is requested; a 16-bit dtype is that of storage.
    storage = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype)
    backend = TorchBackend(
        model,
        open_weights(config, model, files),
        max_model_len=max_model_len,
        precision=Precision(storage=storage),
        num_threads=config.num_threads,
        adapters=_adapter_limits(config),
        progress=progress,
        draft=open_draft(config, model),
        heads=open_heads(config, model),
        draft_head=open_draft_head(config, model, files),
        place=place,
    )
    if place is None:
        _load_media(config, files, backend)
    backend.align_by(alignment_heads(files, model))
    return backend


def _load_media(config: EngineConfig, files: ModelFiles, backend: TakesMedia) -> None:
    """What sees or hears, where the model has such a part."""
    media = None if files.kind == "gguf" else read_media_config(files.config)
    if media is not None and config.max_media_per_prompt(media.kind) != 0:
        checkpoint = open_checkpoint(files, load_format=config.load_format, seed=config.seed)
        is_dummy = config.load_format == "dummy"  # which has whatever is requested
        backend.load_media(media, checkpoint if is_dummy else media_part(checkpoint, media))


def _build_transformers(config: EngineConfig, files: ModelFiles) -> Backend:
    from octavo_engine.backends.torch.fallback.backend import TransformersBackend

    device = "cuda" if config.device == "cuda" else "cpu"
    return TransformersBackend(config, files.path, files.config, device=device)


def _build_cuda(
    config: EngineConfig,
    model: ModelConfig,
    files: ModelFiles,
    *,
    max_model_len: int,
    progress: Callable[[int, int], None] | None,
    place: RankPlace | None = None,
) -> Backend:
    try:
        from octavo_engine.backends.torch.build_cuda import build_cuda, build_plugin
    except ImportError as error:
        packages = "torch triton" if config.device == "cuda" else "torch"
        raise ConfigError(
            f"--device {config.device} needs torch: pip install {packages}"
        ) from error
    build = build_plugin
    if config.device == "cuda":
        build = partial(build_cuda, place=place, shares_device=shares_gpu())
    return build(
        config,
        model,
        open_weights(config, model, files),
        DraftSources(
            open_draft(config, model),
            open_draft_head(config, model, files),
            open_heads(config, model),
        ),
        max_model_len=max_model_len,
        adapters=_adapter_limits(config),
        progress=progress,
    )
