"""/debug/*: what it shows, what it hides, and who may look."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from octavo_router.admin.debug import Debug
from octavo_router.admin.request_reader import RequestReader
from octavo_router.config.settings import FlowConfig, KeyConfig, RouterConfig, ServerConfig
from octavo_router.errors import Rejected
from octavo_router.flow.admin import AdminAccess
from octavo_router.http.messages import Headers, Inbound, Reply
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.residency.scan import scan
from octavo_router.routing.models import Models
from tests.fakes.endpoints import World

ENABLED = RouterConfig(
    server=ServerConfig(debug_endpoints=True, state_token="very secret"),
    flow=FlowConfig(keys=(KeyConfig(tenant="t", key="also secret"),)),
)
BODY = json.dumps(
    {"model": "model", "messages": [{"role": "user", "content": "tell me a story " * 40}]}
).encode()


class Rig:
    """A world with a real index, and debug over it."""

    def __init__(self, config: RouterConfig = ENABLED, *, admin: AdminAccess | None = None) -> None:
        self.world = World(2)
        self.index = PyResidencyIndex()
        for endpoint in self.world.endpoints:
            endpoint.slot = self.index.add_slot()
            endpoint.names = ("model",)
        registry = self.world.registry
        registry.changed(self.world.endpoints[0])
        self.world.dispatcher._index = self.index  # the one that debug reads
        self.reader = RequestReader(scan, Models(registry))
        debug = Debug(
            self.world.dispatcher,
            self.index,
            config=lambda: config,
            understand=self.reader,
            admin=admin or AdminAccess(),
            problems=lambda: {"file": "is no YAML"},
            now=self.world.clock,
        )
        self.routes = debug.routes()

    def ask(
        self,
        path: str,
        body: bytes = b"",
        *,
        query: str = "",
        client: str = "127.0.0.1",
        fields: tuple[tuple[bytes, bytes], ...] = (),
        is_admin: bool = False,
    ) -> Any:
        handler = self.routes["POST" if body else "GET", path]
        headers = Headers(fields)
        reply = handler(
            Inbound("GET", path, query, headers, body=body, client=client, is_admin=is_admin)
        )
        assert isinstance(reply, Reply)
        assert isinstance(reply.body, bytes)
        return json.loads(reply.body)


@pytest.mark.parametrize("path", ["/debug/decisions", "/debug/index", "/debug/config"])
def test_it_is_not_there_unless_it_was_switched_on(path):
    rig = Rig(replace(ENABLED, server=ServerConfig()))
    with pytest.raises(Rejected) as refused:
        rig.ask(path)
    assert refused.value.status == 404


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "127.9.9.9"])
def test_where_no_keys_are_asked_for_this_machine_may_look(client):
    assert "memory_bytes" in Rig().ask("/debug/index", client=client)


@pytest.mark.parametrize("client", ["", "10.0.0.1", "128.0.0.1", "::2", "localhost", "unix:"])
def test_and_nobody_else(client):
    with pytest.raises(Rejected) as refused:
        Rig().ask("/debug/index", client=client)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "field",
    [
        (b"x-forwarded-for", b"10.0.0.1"),
        (b"forwarded", b"for=10.0.0.1"),
        (b"via", b"1.1 proxy"),
        (b"x-envoy-attempt-count", b"1"),
        (b"origin", b"http://localhost:8080"),
        (b"host", b"evil.example:8080"),
    ],
    ids=lambda field: field[0].decode(),
)
def test_nor_whom_a_proxy_or_a_page_on_this_machine_speaks_for(field):
    with pytest.raises(Rejected):
        Rig().ask("/debug/index", fields=(field,))


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:80", "a.LOCALHOST."])
def test_names_of_this_machine_are_no_pages(host):
    assert "memory_bytes" in Rig().ask("/debug/index", fields=((b"host", host.encode()),))


@pytest.mark.parametrize(
    "shown",
    [
        (b"authorization", b"Bearer admin"),
        (b"authorization", b"Bearer trusted"),
        (b"x-octavo-admin-key", b"admin"),
    ],
    ids=["bearer", "a trusted key", "header"],
)
def test_a_key_for_it_opens_it_from_anywhere(shown):
    admin = AdminAccess("admin\n", is_trusted=lambda shown: shown == "Bearer trusted")
    rig = Rig(admin=admin)
    assert "memory_bytes" in rig.ask("/debug/index", client="10.0.0.1", fields=(shown,))


@pytest.mark.parametrize(
    ("client", "shown"),
    [
        ("127.0.0.1", b""),
        ("10.0.0.1", b"Bearer user"),
        ("127.0.0.1", b"Bearer admi"),
        ("127.0.0.1", b"Bearer "),
        ("127.0.0.1", b"Bearer admin\xe9"),
    ],
)
def test_and_nothing_else_does(client, shown):
    with pytest.raises(Rejected) as refused:
        Rig(admin=AdminAccess("admin")).ask(
            "/debug/index", client=client, fields=((b"authorization", shown),)
        )
    assert (refused.value.status, refused.value.code) == (403, "admin_key_required")


def test_a_listener_of_its_own_needs_no_key_unless_there_is_one():
    assert "memory_bytes" in Rig().ask("/debug/index", client="10.0.0.1", is_admin=True)
    with pytest.raises(Rejected):
        Rig(admin=AdminAccess("admin")).ask("/debug/index", is_admin=True)


def test_settings_without_their_secrets():
    shown = Rig().ask("/debug/config")
    assert shown["server"]["port"] == 8080
    assert "secret" not in json.dumps(shown)


def test_endpoints_say_why_they_are_not_ready():
    rig = Rig()
    first, second = rig.world.endpoints
    rig.world.registry.report(first, "down", "nothing was heard for 5 s")
    rig.world.tell(second, running=2)
    rig.world.clock.advance(1.5)
    shown = rig.ask("/debug/endpoints")
    assert shown["problems"] == {"file": "is no YAML"}
    rows = {row["id"]: row for row in shown["endpoints"]}
    assert rows[first.id]["state"] == "down"
    assert rows[first.id]["reason"] == "nothing was heard for 5 s"
    assert rows[first.id]["told"]["age_s"] is None
    assert rows[second.id]["told"]["running"] == 2
    assert rows[second.id]["told"]["age_s"] == 1.5


def test_a_route_is_explained_and_nothing_is_reserved():
    rig = Rig()
    first, second = rig.world.endpoints
    request = rig.reader("/v1/chat/completions", BODY)
    rig.index.assume(second.slot, request.keys, 16.0)
    shown = rig.ask("/debug/route", BODY)
    assert shown["endpoint"] == second.id
    assert shown["policy"] == "prefix-load"
    assert shown["matched_tokens"] > 0
    assert shown["num_keys"] == len(request.keys) // 8
    assert len(shown["candidates"]) == 2
    assert "story" not in json.dumps(shown)
    assert first.in_flight == second.in_flight == 0
    assert rig.world.dispatcher.num_picks == 0


def test_a_route_that_leads_nowhere():
    rig = Rig()
    for endpoint in rig.world.endpoints:
        rig.world.registry.report(endpoint, "down", "gone")
    assert rig.ask("/debug/route", BODY)["endpoint"] is None


@pytest.mark.parametrize(
    ("body", "query", "status"),
    [(b"{", "", 400), (b'{"model": "absent"}', "", 404), (BODY, "path=/metrics", 400)],
)
def test_a_body_that_the_router_would_refuse_is_refused_here_too(body, query, status):
    with pytest.raises(Rejected) as refused:
        Rig().ask("/debug/route", body, query=query)
    assert refused.value.status == status


def test_decisions_newest_first():
    rig = Rig()
    for number in range(3):
        request = rig.reader("/v1/chat/completions", BODY)
        request.request_id, request.explain = f"r{number}", True
        lease = rig.world.dispatcher.place(request)
        assert lease is not None
        lease.finish()
    shown = rig.ask("/debug/decisions", query="limit=2")
    assert [decision["request_id"] for decision in shown["decisions"]] == ["r2", "r1"]
    assert rig.ask("/debug/decisions", query="pool=absent")["decisions"] == []
    with pytest.raises(Rejected):
        rig.ask("/debug/decisions", query="limit=many")


def test_index_sizes():
    rig = Rig()
    first, second = rig.world.endpoints
    rig.index.assume(first.slot, bytes(range(16)), 16.0)
    rows = {row["endpoint"]: row["keys"] for row in rig.ask("/debug/index")["endpoints"]}
    assert rows == {first.id: 2, second.id: 0}
