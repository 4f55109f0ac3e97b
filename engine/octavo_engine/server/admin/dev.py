"""Routes for development, there with --dev-mode only: caches, sleep, profiles, settings."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from octavo_engine import __version__
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service, optional

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECRETS = frozenset(("key", "keys", "password", "secret"))  # as a word of a name


class SleepQuery(msgspec.Struct, kw_only=True):
    # 1 lets go of the KV cache, and on a GPU of the weights, which the host keeps. 2 keeps nothing:
    # they are read again. On a CPU both are the same: weights are mapped files, which the system
    # drops by itself when memory is short.
    level: int = 1
    mode: Literal["abort", "wait"] = "abort"  # what becomes of requests that run


class WakeQuery(msgspec.Struct, kw_only=True):
    tags: list[str] | None = None  # of weights and kv_cache; everything wakes whichever is given


class PauseQuery(msgspec.Struct, kw_only=True):
    mode: Literal["abort", "wait"] = "abort"  # what becomes of requests that run
    clear_cache: bool = True  # forget all prefixes: other weights make other KV


class Paused(msgspec.Struct, kw_only=True):
    is_paused: bool


class WorldSize(msgspec.Struct, kw_only=True):
    world_size: int


class InfoQuery(msgspec.Struct, kw_only=True):
    config_format: Literal["text", "json"] = "text"


class Sleeping(msgspec.Struct, kw_only=True):
    is_sleeping: bool


class ServerInfo(msgspec.Struct, kw_only=True):
    version: str
    config: Any  # of the engine: an object, or text
    server_config: Any
    model: Any  # None while it loads
    env: dict[str, str]  # OCTAVO_* without secrets


class ProfileAnswer(msgspec.Struct, kw_only=True):
    file: str  # on the server; open it in ui.perfetto.dev
    events: int


async def start_profile(exchange: Exchange, service: Service) -> None:
    await service.engine.start_profile()
    await exchange.reply(b"", headers=[])


async def stop_profile(exchange: Exchange, service: Service) -> None:
    file = _profile_file(service.settings.profile_dir)
    answer = ProfileAnswer(file=file, events=await service.engine.stop_profile(file))
    await exchange.reply(msgspec.json.encode(answer))


async def sleep(exchange: Exchange, service: Service) -> None:
    query = read_query(exchange, SleepQuery)
    if query.level not in (1, 2):
        raise InvalidRequest(f"level must be 1 or 2; got {query.level}", param="level")
    await service.sleep.fall_asleep(abort=query.mode == "abort", level=query.level)
    await exchange.reply(b"", headers=[])


async def wake_up(exchange: Exchange, service: Service) -> None:
    read_query(exchange, WakeQuery)
    await service.sleep.wake_up()
    await exchange.reply(b"", headers=[])


async def is_sleeping(exchange: Exchange, service: Service) -> None:
    await exchange.reply(msgspec.json.encode(Sleeping(is_sleeping=service.sleep.is_on)))


async def pause(exchange: Exchange, service: Service) -> None:
    query = read_query(exchange, PauseQuery)
    await service.pause.begin(abort=query.mode == "abort", clear_cache=query.clear_cache)
    await exchange.reply(msgspec.json.encode(Paused(is_paused=service.pause.is_on)))


async def resume(exchange: Exchange, service: Service) -> None:
    service.pause.end()
    await exchange.reply(msgspec.json.encode(Paused(is_paused=False)))


async def is_paused(exchange: Exchange, service: Service) -> None:
    await exchange.reply(msgspec.json.encode(Paused(is_paused=service.pause.is_on)))


async def world_size(exchange: Exchange, service: Service) -> None:
    """Processes that hold weights: the cores, or the ranks that hold a model together in each."""
    config = service.engine.config
    size = config.num_ranks * config.data_parallel_size
    await exchange.reply(msgspec.json.encode(WorldSize(world_size=size)))


async def reset_prefix_cache(exchange: Exchange, service: Service) -> None:
    if service.engine.stats.num_running:
        raise InvalidRequest("requests run that hold parts of the cache; ask again without them")
    await service.engine.reset_prefix_cache()
    await exchange.reply(b"", headers=[])


async def reset_nothing(exchange: Exchange, service: Service) -> None:
    """Of caches that text models do not have: they are empty, which is the aim."""
    await exchange.reply(b"", headers=[])


async def server_info(exchange: Exchange, service: Service) -> None:
    query = read_query(exchange, InfoQuery)
    info = optional(lambda: service.engine.info)
    config = _plain(service.engine.config)
    server = _plain(service.settings)
    if query.config_format == "text":
        config, server = _text(config), _text(server)
    model = None if info is None else msgspec.to_builtins(info)
    answer = ServerInfo(
        version=__version__, config=config, server_config=server, model=model,
        env=public_environment(os.environ),
    )  # fmt: skip
    await exchange.reply(msgspec.json.encode(answer))


def _profile_file(folder: str) -> str:
    name = time.strftime("octavo-%Y%m%d-%H%M%S") + f"-{secrets.token_hex(2)}.json.gz"
    return str(Path(folder).absolute() / name)


def read_query(exchange: Exchange, kind: type[Any]) -> Any:
    """The query's parameters as `kind`. Raises InvalidRequest that names the parameter."""
    from urllib.parse import parse_qsl

    given: dict[str, Any] = {}
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in parse_qsl(exchange.scope["query_string"].decode("latin-1")):
        if name in fields and "list" in str(fields[name].type):
            given.setdefault(name, []).append(value)
        else:
            given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        where = str(error).rpartition("`$.")[2].rstrip("`")
        raise InvalidRequest(f"{where}: {str(error).partition(' - at')[0]}", param=where) from None


def public_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("OCTAVO_") and not _is_secret(name)
    }


def _plain(value: Any, name: str = "") -> Any:
    """As JSON has it, without secrets."""
    if _is_secret(name) and value:
        return "(set, not shown)"
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name), name) for name in names}
    return list(value) if isinstance(value, tuple) else value


def _is_secret(name: str) -> bool:
    words = name.lower().split("_")
    return words[-1] == "token" or not _SECRETS.isdisjoint(words)


def _text(value: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}={json.dumps(each, default=str)}" for name, each in value.items())
