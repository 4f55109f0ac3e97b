"""The API server's settings: where it listens, who may call, what it says."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from octavo_engine.errors import ConfigError
from octavo_engine.protocol.endpoints import ENGINE_PORT
from octavo_engine.server.limits import RequestLimits

_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What `octavo serve` was given, beside the engine itself."""

    host: str = "127.0.0.1"  # safe by default; a container says 0.0.0.0
    port: int = ENGINE_PORT  # 0: any free one
    admin_host: str = "127.0.0.1"
    admin_port: int = 0  # of a listener for administrators; 0: none
    uds: str = ""  # path of a Unix socket to listen on, instead of host and port
    root_path: str = ""  # what a proxy in front takes off each path
    api_keys: tuple[str, ...] = ()  # none, and no file: everybody may call
    api_key_file: str = ""  # one key a line; read again when it changes
    admin_api_keys: tuple[str, ...] = ()  # for routes that change the server; none: api_keys do
    admin_api_key_file: str = ""
    ssl_certfile: str = ""  # PEM; these files too are read again when they change
    ssl_keyfile: str = ""
    ssl_keyfile_password: str = ""
    ssl_ca_certs: str = ""  # authorities whose certificates clients may show
    # auto: required where authorities are given; protected: by all routes but the public ones
    ssl_cert_reqs: Literal["auto", "none", "optional", "required", "protected", "0", "1", "2"] = (
        "auto"
    )
    ssl_client_names: tuple[str, ...] = ()  # in their certificates; none: any of the authorities'
    ssl_ciphers: str = ""
    allowed_origins: tuple[str, ...] = ()  # CORS; none: browsers of other sites are refused
    allowed_methods: tuple[str, ...] = ("GET", "POST", "DELETE")
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    allowed_media_domains: tuple[str, ...] = ()  # hosts of pictures; none: https: is refused
    allowed_local_media_path: str = ""  # folder of pictures; empty: file: is refused
    docs: bool = True  # /docs and /openapi.json
    tokenizer_info: bool = False  # GET /tokenizer_info, which shows the chat template
    dev_mode: bool = False  # routes for development: caches, sleep, server info
    shutdown_timeout_s: float = 120.0  # how long requests in flight may take after SIGTERM
    request_timeout_s: float | None = None  # deadline of every request
    generation_config: Literal["auto", "vllm"] = "auto"  # auto: sampling defaults of the model
    response_role: str = "assistant"
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"  # name of a format; auto: detected from the chat template
    reasoning_parser: str = "auto"
    tool_parser_plugin: str = ""  # Python file with formats of its own
    reasoning_parser_plugin: str = ""  # another one; either may have both kinds
    enable_auto_tool_choice: bool = True  # off: tools need tool_choice required or a name
    exclude_tools_when_tool_choice_none: bool = False  # they are shown to the model otherwise
    force_include_usage: bool = False  # streams end with usage whether or not it was requested
    response_store: bool = True  # of /v1/responses, in memory; see also limits
    files_dir: str = ""  # of files and batches; empty: there are none
    batch_concurrency: int = 32  # requests of batches at once, of all batches together
    lora_modules: tuple[str, ...] = ()  # adapters to serve from the start: NAME=PATH, or JSON
    lora_resolver_dir: str = ""  # folder of adapters that a request may name without being loaded
    lora_resolver_hub: tuple[str, ...] = ()  # repositories of the Hub, likewise: ORG/NAME[@REV]
    lora_resolvers: tuple[str, ...] = ()  # of packages, which find adapters that a request names
    allow_runtime_lora_updating: bool = False  # load and unload others while the server runs
    vllm_metrics: bool = True  # every metric also under vLLM's name, which other tools read
    # auto: requests where `octavo serve` has a terminal, else errors; requests: no probes or pages
    access_log: Literal["auto", "errors", "requests", "all", "none"] = "auto"
    log_requests: bool = False  # a line for each request that comes in, without its text
    log_outputs: bool = False  # a line for each answer that is done, without its text
    log_stats: bool = True  # a line of statistics every ten seconds while there is work
    max_log_len: int | None = None  # of texts, which level debug shows; None: whole ones
    otlp_endpoint: str = ""  # collector of traces; none: no traces
    otlp_sample_ratio: float = 1.0  # of requests whose caller does not decide it
    profile_dir: str = "."  # where POST /stop_profile leaves what was recorded
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    pod_uid: str = ""  # of the pod this runs in; what is meant for another is refused with 421
    limits: RequestLimits = field(default_factory=RequestLimits)

    @property
    def client_certificates(self) -> Literal["none", "optional", "required", "protected"]:
        """What `ssl_cert_reqs` comes to."""
        if self.ssl_cert_reqs == "auto":
            return "required" if self.ssl_ca_certs else "none"
        numbers: dict[str, Literal["none", "optional", "required"]]
        numbers = {"0": "none", "1": "optional", "2": "required"}
        return numbers.get(self.ssl_cert_reqs) or cast(
            'Literal["none", "optional", "required", "protected"]', self.ssl_cert_reqs
        )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535; got {self.port}")
        self._check_admin_listener()
        if any(not key for key in self.api_keys):
            raise ConfigError("--api-key must not be empty; leave it out to let everybody call")
        if any(not key for key in self.admin_api_keys):
            raise ConfigError("--admin-api-key must not be empty")
        if not self.ssl_certfile and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        self._check_client_certificates()
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path must look like /this; got {self.root_path}")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials needs --allowed-origins that name the origins")
        for host in self.allowed_media_domains:
            if not host or (host != "*" and not _HOST.fullmatch(host)):
                raise ConfigError(
                    "--allowed-media-domains must be names of hosts, such as images.example.com, "
                    f"or *; got {host!r}"
                )
        for flag, folder in (
            ("--allowed-local-media-path", self.allowed_local_media_path),
            ("--lora-resolver-dir", self.lora_resolver_dir),
        ):
            if folder and not Path(folder).is_dir():
                raise ConfigError(f"{flag} must be a folder; got {folder}")
        if not 0.0 <= self.otlp_sample_ratio <= 1.0:
            raise ConfigError(
                f"--otlp-sample-ratio must be between 0 and 1; got {self.otlp_sample_ratio}"
            )
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"--max-log-len must not be negative; got {self.max_log_len}")
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise ConfigError(f"--request-timeout must be positive; got {self.request_timeout_s}")
        if self.batch_concurrency < 1:
            raise ConfigError(
                f"--batch-concurrency must be at least 1; got {self.batch_concurrency}"
            )
        if self.shutdown_timeout_s < 0:
            raise ConfigError(
                f"--shutdown-timeout must not be negative; got {self.shutdown_timeout_s}"
            )

    def _check_admin_listener(self) -> None:
        if not 0 <= self.admin_port <= 65535:
            raise ConfigError(f"--admin-port must be between 0 and 65535; got {self.admin_port}")
        if self.admin_port and self.admin_port == self.port and not self.uds:
            raise ConfigError(f"--admin-port {self.admin_port} is --port; choose another one")
        is_guarded = (
            self.api_keys or self.api_key_file or self.admin_api_keys or self.admin_api_key_file
            or self.client_certificates in ("required", "protected")
        )  # fmt: skip
        if self.admin_port and not is_guarded and not _is_loopback(self.admin_host):
            raise ConfigError(
                f"--admin-host {self.admin_host} lets other machines stop this server: require a "
                "key (--admin-api-key-file) or a certificate (--ssl-ca-certs), or leave it at "
                "127.0.0.1"
            )

    def _check_client_certificates(self) -> None:
        if self.client_certificates != "none" and not self.ssl_ca_certs:
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs")
        if self.ssl_client_names and self.client_certificates not in ("required", "protected"):
            raise ConfigError(
                "--ssl-client-names needs --ssl-ca-certs, and --ssl-cert-reqs required or protected"
            )
        if any(not name.strip() for name in self.ssl_client_names):
            raise ConfigError("--ssl-client-names must not have an empty name")


def _is_loopback(host: str) -> bool:
    """A name that is not an address may lead anywhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
