"""A new configuration: each setting is either in force at once, or is said to need a restart."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.load import walk
from octavo_router.config.settings import (
    KeyConfig,
    PoolConfig,
    ProfileConfig,
    RouterConfig,
    ServedModelConfig,
    UpstreamConfig,
    WeightedConfig,
)
from octavo_router.config.show import RESTART_ONLY, differences
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import Received, ScriptedUpstream
from tests.router.test_server import configuration, plain_server, running, until_ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.app import App
    from octavo_router.server import Server
    from tests.fakes.upstream import Peer

PROFILE = ProfileConfig(name="mine", scorers=(WeightedConfig(name="queue"),))

# Where no other value follows from the setting itself.
OTHERS: dict[str, Any] = {
    "discovery.upstreams": (UpstreamConfig(url="http://127.0.0.1:7"),),
    "routing.policy": "round-robin",
    "routing.pools": (PoolConfig(name="p", policy="random"),),
    "routing.profiles": (PROFILE,),
    "routing.shadows": ("random",),
    "models": (ServedModelConfig(name="alias", alias_of="m"),),
    "flow.keys": (KeyConfig(tenant="t", key="secret"),),
}

# What holds now, where it is not simply a part of the configuration that somebody was given.
IN_FORCE: dict[str, Callable[[App, Server], Any]] = {
    "server.drain_timeout_s": lambda app, server: server._app.config.server.drain_timeout_s,
    "server.accept_while_draining_s": (
        lambda app, server: server._app.config.server.accept_while_draining_s
    ),
    "server.log_level": lambda app, server: logging.getLevelName(
        logging.getLogger("octavo").level
    ).lower(),
    "server.access_log": lambda app, server: app.access_log._mode,
    "server.state_token": lambda app, server: app._state._token.decode(),
    "server.open_state": lambda app, server: app._state._is_open,
    "server.admin_key": lambda app, server: app.admin._key.decode(),
    "limits.max_connections": lambda app, server: server.shared.max_connections,
    "limits.max_event_bytes": lambda app, server: app.proxy._max_event_bytes,
    "discovery.upstreams": lambda app, server: tuple(
        upstream.config for upstream in app._static._upstreams
    ),
    "routing.policy": lambda app, server: app.dispatcher.policies.default.name,
    "routing.pools": lambda app, server: tuple(
        PoolConfig(name=name, policy=policy.name)
        for name, policy in app.dispatcher.policies.by_pool.items()
    ),
    "routing.profiles": lambda app, server: app.config.routing.profiles,
    "routing.shadows": lambda app, server: tuple(_there(app.dispatcher.shadows)._policies),
    "routing.sample_every": lambda app, server: app.dispatcher.sample_every,
    "routing.zone_cost_s": lambda app, server: _there(app.dispatcher.locality).cost_s,
    "routing.balance_factor": lambda app, server: _default(app)._factor,
    "routing.balance_slack": lambda app, server: _default(app)._slack,
    "routing.prefill_min_tokens": lambda app, server: (
        _there(app.dispatcher.policies.by_pool.get("pair")).min_tokens
    ),
    "routing.prefill_first_token_s": lambda app, server: (
        _there(app.dispatcher.policies.by_pool.get("pair")).targets.first_token_s
    ),
    "routing.prefill_token_s": lambda app, server: (
        _there(app.dispatcher.policies.by_pool.get("pair")).targets.token_s
    ),
    "routing.session_headers": lambda app, server: tuple(
        name.decode() for name in app.proxy._facts._session_headers
    ),
    "routing.session_cookie": lambda app, server: app.proxy._facts._session_cookie.decode(),
    "models": lambda app, server: tuple(app.models._config.values()),
    "flow.keys": lambda app, server: app._keys_file._config.keys,
    "flow.keys_file": lambda app, server: app._keys_file._config.keys_file,
}


def _there(part: Any) -> Any:
    """A part of the router that these settings bring."""
    assert part is not None
    return part


def _default(app: App) -> Any:
    return app.dispatcher.policies.default


HOLDERS: dict[str, Callable[[App, Server], tuple[Any, ...]]] = {
    "limits": lambda app, server: (server.shared.limits, server.shared.parser._limits),
    "timeouts": lambda app, server: (
        server.shared.timeouts,
        app.proxy.timeouts,
        app.upstreams._timeouts,
    ),
    "flow": lambda app, server: (app.gate.config, app._rooms.config),
    "retry": lambda app, server: (app.proxy.retry, app.proxy.budget.config, app._throttle.config),
    "health": lambda app, server: (
        _there(app.dispatcher.health).config,
        app._canaries.config.health,
    ),
}

SETTINGS = [".".join(path) for path, _, _ in walk(RouterConfig)]


def other(config: RouterConfig, path: str) -> RouterConfig:
    """The same, but for one setting."""
    names = path.split(".")
    parts: list[Any] = [config]
    for name in names[:-1]:
        parts.append(getattr(parts[-1], name))
    value = OTHERS[path] if path in OTHERS else changed(parts[-1], names[-1])
    for part, name in zip(reversed(parts), reversed(names), strict=True):
        value = dataclasses.replace(part, **{name: value})
    return value  # type: ignore[no-any-return]


def changed(part: Any, name: str) -> Any:
    (field,) = (one for one in dataclasses.fields(part) if one.name == name)
    value, meta = getattr(part, name), field.metadata
    if choices := meta["choices"]:
        return next(choice for choice in choices if choice not in ("", value))
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 if value and value * 2 <= (meta["high"] or 1e12) else value / 2 + 1
        case tuple():
            return ("x-other",)
        case _:
            return "other"


def in_force(path: str, app: App, server: Server) -> list[Any]:
    if path in IN_FORCE:
        return [IN_FORCE[path](app, server)]
    section, _, name = path.rpartition(".")
    return [getattr(holder, name) for holder in HOLDERS[section](app, server)]


@pytest.mark.parametrize("path", [path for path in SETTINGS if not path.startswith(RESTART_ONLY)])
@on_loop
async def test_a_setting_that_needs_no_restart_is_in_force_at_once(path, tmp_path):
    level = logging.getLogger("octavo").level
    pools = "[{name: pair, policy: prefill-decode}]"
    pair = f"routing: {{prefill_first_token_s: 1, pools: {pools}}}"
    before = configuration(9, text=f"limits: {{max_connections: 50}}\n{pair}\n")
    OTHERS["flow.keys_file"] = str(tmp_path / "keys.yaml")
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    async with running(before) as (app, server):
        after = other(before, path)
        assert [change.path for change in differences(before, after)] == (
            [path] if after != before else []
        )
        app.apply(after)
        value: Any = after
        for name in path.split("."):
            value = getattr(value, name)
        assert in_force(path, app, server) == [value] * len(in_force(path, app, server))
    logging.getLogger("octavo").setLevel(level)


def test_what_needs_a_restart_is_named_and_there():
    for name in RESTART_ONLY:
        assert any(path.startswith(name) for path in SETTINGS), name


@on_loop
async def test_a_connection_that_is_open_goes_by_the_new_limits():
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configuration(upstream.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        body = chat("x" * 3000)
        assert (await client.ask(body)).status == 200
        app.apply(configuration(upstream.port, text="limits: {max_body_bytes: 2000}"))
        assert (await client.ask(body)).status == 413


@on_loop
async def test_keys_that_are_asked_for_from_now_on_do_not_reach_engines():
    seen: list[str | None] = []

    async def server_of_keys(peer: Peer, request: Received) -> None:
        if b"chat" in request.line:
            seen.append(request.header("authorization"))
        await plain_server(peer, request)

    async with (
        ScriptedUpstream(server_of_keys) as upstream,
        running(configuration(upstream.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        shown = "authorization: Bearer secret\r\n"
        assert (await client.ask(chat(), more=shown)).status == 200
        app.apply(configuration(upstream.port, text="flow: {keys: [{tenant: t, key: secret}]}"))
        assert (await client.ask(chat(), more=shown)).status == 200
    assert seen == ["Bearer secret", None]
