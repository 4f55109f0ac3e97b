"""The API server's settings: where it listens, who may call, what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo_engine.errors import ConfigError
from octavo_engine.protocol.endpoints import ENGINE_PORT
from octavo_engine.server.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What `octavo serve` was asked for, beside the engine itself."""

    host: str = "127.0.0.1"  # safe by default; a container says 0.0.0.0
    port: int = ENGINE_PORT  # 0: any free one
    api_keys: tuple[str, ...] = ()  # none: everybody may call
    allowed_origins: tuple[str, ...] = ()  # CORS; none: browsers of other sites are refused
    shutdown_timeout_s: float = 120.0  # how long requests in flight may take after SIGTERM
    request_timeout_s: float | None = None  # deadline of every request
    generation_config: Literal["auto", "vllm"] = "auto"  # auto: sampling defaults of the model
    response_role: str = "assistant"
    trust_request_chat_template: bool = False
    vllm_metrics: bool = False  # also emit every metric under vLLM's name
    access_log: Literal["errors", "all", "none"] = "errors"
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    pod_uid: str = ""  # of the pod this runs in; what is meant for another is refused with 421
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535; got {self.port}")
        if any(not key for key in self.api_keys):
            raise ConfigError("--api-key must not be empty; leave it out to let everybody call")
        if self.shutdown_timeout_s < 0:
            raise ConfigError(
                f"--shutdown-timeout must not be negative; got {self.shutdown_timeout_s}"
            )
