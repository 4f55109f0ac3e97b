"""vLLM's environment variables: none is read here, and each has one sentence on what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "VLLM_"
_NO_TORCH_COMPILE = "models are not compiled; unset it"
_ONE_HOST = "an engine runs on one machine and finds its own ports; unset it"
_NIXL = "KV blocks are moved by --kv-transfer-config with OctavoConnector; unset it"
_LOGGING = "set OCTAVO_LOG_LEVEL and OCTAVO_LOG_FORMAT"
_NO_MEDIA = "media are read within the limits of the server's flags; unset it"
_KERNELS = "kernels are chosen by the device and the weights; unset it"
_NO_STATS = "no usage statistics are sent anywhere; unset it"

# By their names without the prefix.
ADVICE: Mapping[str, str] = {
    "API_KEY": "set OCTAVO_API_KEY",
    "HOST_IP": "set OCTAVO_HOST to the address to listen on",
    "PORT": "set OCTAVO_PORT",
    "RPC_BASE_PATH": _ONE_HOST,
    "RPC_TIMEOUT": _ONE_HOST,
    "DP_RANK": "a server chooses the ranks of its cores; unset it",
    "DP_SIZE": "set OCTAVO_DATA_PARALLEL_SIZE: cores behind one server on this host",
    "DP_MASTER_IP": "start several engines behind `octavo router`; unset it",
    "DP_MASTER_PORT": "start several engines behind `octavo router`; unset it",
    "CACHE_ROOT": "set OCTAVO_HOME for state and pulled models, and HF_HOME for the Hub's cache",
    "CONFIG_ROOT": "set OCTAVO_CONFIG to a file of settings",
    "ASSETS_CACHE": "set HF_HOME for the Hub's cache",
    "USE_MODELSCOPE": "set HF_ENDPOINT to the address of another hub",
    "MODEL_REDIRECT_PATH": "name the folder as the model",
    "CPU_KVCACHE_SPACE": "set OCTAVO_KV_CACHE_MEMORY_BYTES, such as 4GiB",
    "CPU_OMP_THREADS_BIND": "set OCTAVO_NUM_THREADS; taskset or a cpuset binds the process",
    "CPU_NUM_OF_RESERVED_CPU": "set OCTAVO_NUM_THREADS",
    "CPU_MOE_PREPACK": _KERNELS,
    "CPU_SGL_KERNEL": _KERNELS,
    "TARGET_DEVICE": "set OCTAVO_DEVICE: cpu, cuda, torch or sim",
    "ATTENTION_BACKEND": "set OCTAVO_ATTENTION_BACKEND",
    "USE_TRITON_FLASH_ATTN": "set OCTAVO_KERNELS or OCTAVO_ATTENTION_BACKEND",
    "FLASH_ATTN_VERSION": "set OCTAVO_ATTENTION_BACKEND",
    "USE_FLASHINFER_SAMPLER": "there is one sampler on each device; unset it",
    "USE_TRITON_AWQ": _KERNELS,
    "USE_DEEP_GEMM": _KERNELS,
    "MARLIN_USE_ATOMIC_ADD": _KERNELS,
    "FUSED_MOE_CHUNK_SIZE": _KERNELS,
    "BATCH_INVARIANT": "set OCTAVO_BATCH_INVARIANT=1; a CPU always is",
    "USE_V1": "there is one engine; unset it",
    "ENABLE_V1_MULTIPROCESSING": "the engine always has a process of its own; unset it",
    "WORKER_MULTIPROC_METHOD": "workers are always new processes; unset it",
    "ALLOW_LONG_MAX_MODEL_LEN": "OCTAVO_MAX_MODEL_LEN may not exceed the model's own length; "
                                "OCTAVO_HF_OVERRIDES changes what config.json states",
    "ALLOW_INSECURE_SERIALIZATION": "nothing is unpickled; unset it",
    "ALLOW_RUNTIME_LORA_UPDATING": "set OCTAVO_ALLOW_RUNTIME_LORA_UPDATING=1",
    "SERVER_DEV_MODE": "set OCTAVO_DEV_MODE=1",
    "PLUGINS": "plug-ins that are installed as entry points are always offered; unset it",
    "TORCH_PROFILER_DIR": "set OCTAVO_PROFILE_DIR",
    "LOGGING_LEVEL": _LOGGING,
    "LOGGING_CONFIG_PATH": _LOGGING,
    "LOGGING_PREFIX": _LOGGING,
    "LOGGING_STREAM": _LOGGING,
    "CONFIGURE_LOGGING": _LOGGING,
    "LOG_STATS_INTERVAL": "OCTAVO_LOG_STATS=1 logs a line every ten seconds",
    "DEBUG_LOG_API_SERVER_RESPONSE": "set OCTAVO_ENABLE_LOG_OUTPUTS=1",
    "NO_USAGE_STATS": _NO_STATS,
    "DO_NOT_TRACK": _NO_STATS,
    "USAGE_STATS_SERVER": _NO_STATS,
    "USAGE_SOURCE": _NO_STATS,
    "KEEP_ALIVE_ON_ENGINE_DEATH": "/health reports an engine that has died; unset it",
    "HTTP_TIMEOUT_KEEP_ALIVE": "the life of idle connections is not a setting; unset it",
    "ENGINE_ITERATION_TIMEOUT_S": "/health fails without progress; unset it",
    "SLEEP_WHEN_IDLE": "an idle engine always sleeps; unset it",
    "IMAGE_FETCH_TIMEOUT": _NO_MEDIA,
    "VIDEO_FETCH_TIMEOUT": _NO_MEDIA,
    "AUDIO_FETCH_TIMEOUT": _NO_MEDIA,
    "MAX_AUDIO_CLIP_FILESIZE_MB": _NO_MEDIA,
    "DISABLE_COMPILE_CACHE": _NO_TORCH_COMPILE,
    "TORCH_COMPILE_LEVEL": _NO_TORCH_COMPILE,
    "USE_AOT_COMPILE": _NO_TORCH_COMPILE,
    "TEST_FORCE_FP8_MARLIN": _KERNELS,
    "RAY_PER_WORKER_GPUS": _ONE_HOST,
    "USE_RAY_COMPILED_DAG": _ONE_HOST,
    "NIXL_SIDE_CHANNEL_HOST": _NIXL,
    "NIXL_SIDE_CHANNEL_PORT": _NIXL,
    "PP_LAYER_PARTITION": "set OCTAVO_PIPELINE_LAYER_PARTITION to the same numbers",
    "TOOL_PARSE_REGEX_TIMEOUT_SECONDS": "reading tool calls has no time limit; unset it",
    "XGRAMMAR_CACHE_MB": "grammars are compiled by llguidance; unset it",
    "LORA_RESOLVER_CACHE_DIR": "set OCTAVO_LORA_RESOLVER_DIR to the same folder",
    "LORA_RESOLVER_HF_REPO_LIST": "set OCTAVO_LORA_RESOLVER_HUB to the same list",
}  # fmt: skip
# Of images, builds and Kubernetes' service links (VLLM_SERVICE_HOST): not about an engine.
_OF_OTHERS = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT_")


def vllm_environment_advice(environ: Mapping[str, str]) -> dict[str, str]:
    """What to do instead of setting these variables, by their full names."""
    found = {}
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if name == variable or any(part in variable for part in _OF_OTHERS):
            continue
        if name == "PORT" and environ[variable].startswith("tcp://"):
            continue  # the link to a Service whose name is vllm
        found[variable] = ADVICE.get(name, "octavo serve --help=all lists the variables that are")
    return found
