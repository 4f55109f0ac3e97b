"""`kv_transfer_params`: a prompt's KV cache that another engine has, or will fetch; vLLM's fields.

A request with `do_remote_decode` computes a prompt for another engine; its answer says where the
cache lies. With that in a request (`do_remote_prefill`) the other engine fetches it. Only the
address matters: which blocks are wanted follows from the prompt. A field of ours says that the
prompt is being computed there now (`remote_is_computing`): its blocks are fetched as they come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.errors import not_supported
from octavo_engine.state.kv_source import KVSource

if TYPE_CHECKING:
    from octavo_engine.config import KVTransferConfig
    from octavo_engine.core.info import ModelInfo

_PARAM = "kv_transfer_params"
_MAX_HOST = 255


def read_kv_source(given: Any, config: KVTransferConfig | None) -> KVSource | None:
    """The engine that a request's prompt was computed by. Raises RequestError."""
    if not given:
        return None
    if config is None:
        raise not_supported(_PARAM)
    if not isinstance(given, dict):
        raise InvalidRequest(f"{_PARAM} must be an object", param=_PARAM)
    remote_decode = _flag(given, "do_remote_decode")
    if remote_decode and not config.produces:
        raise _role_error("do_remote_decode", "kv_producer")
    if not _flag(given, "do_remote_prefill"):
        return None
    if not config.consumes:
        raise _role_error("do_remote_prefill", "kv_consumer")
    host, port = given.get("remote_host"), given.get("remote_port")
    if not isinstance(host, str) or not 0 < len(host) <= _MAX_HOST or not host.isprintable():
        raise InvalidRequest(
            f"{_PARAM}.remote_host must be the address of an engine, of up to {_MAX_HOST} "
            "characters",
            param=_PARAM,
        )
    if type(port) is not int or not 0 < port < 1 << 16:
        raise InvalidRequest(f"{_PARAM}.remote_port must be from 1 to 65535", param=_PARAM)
    return KVSource(host, port, is_computing=_flag(given, "remote_is_computing"))


def kv_answer(given: Any, info: ModelInfo, request_id: str) -> dict[str, Any] | None:
    """What an answer says of where its prompt's cache lies, if the request wanted to know."""
    source = info.kv_source
    if source is None or not isinstance(given, dict) or given.get("do_remote_decode") is not True:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": source.engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": None,
        "remote_host": source.host,
        "remote_port": source.port,
    }


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{_PARAM}.{name} must be true or false", param=_PARAM)
    return bool(value)


def _role_error(field: str, role: str) -> InvalidRequest:
    return InvalidRequest(
        f"{_PARAM}.{field} needs an engine of --kv-transfer-config with kv_role {role} or kv_both",
        param=_PARAM,
    )
