"""Requests made up from the interface's own description, through the router: nothing breaks it.

The same judge as in front of an engine alone: statuses, bodies and each event are as described. The
long form is `python tests/fuzz.py --router`.
"""

from __future__ import annotations

import httpx
import pytest

from octavo_router.proxy.paths import PROXIED
from tests.fakes.api_fuzz import MODES, Contract, Fuzz
from tests.fakes.router_process import routing
from tests.fakes.simulated import simulating

pytestmark = pytest.mark.slow

# Of each shape one; `tests/fuzz.py` asks all.
ROUTES = ["/v1/completions", "/v1/messages", "/tokenize", "/rerank"]
NUM_EXAMPLES = 5


def test_answers_and_events_are_as_described_and_none_is_the_routers_fault():
    with (
        simulating() as engine,
        routing("--upstreams", engine.url) as router,
        httpx.Client(timeout=20) as client,
    ):
        router.until(lambda: "ready" in router.states().values())
        contract = Contract(client.get(engine.url + "/openapi.json").json())
        fuzz = Fuzz(engine, client, contract, base_url=router.url)
        for number, path in enumerate(ROUTES):
            assert path in PROXIED
            for mode in MODES:
                fuzz.batch("POST", path, mode, examples=NUM_EXAMPLES, number=number)
        assert fuzz.statuses[200] > 3
        assert fuzz.statuses[400] > 3
        assert not fuzz.statuses.keys() & {500, 502}
        assert router.metric("octavo_router_requests_total", code="500") == 0
        refused = [line for line in router.access_lines if line.get("code") == "internal_error"]
        assert not refused
        assert not [line for line in router.lines if line["level"] == "error"]
