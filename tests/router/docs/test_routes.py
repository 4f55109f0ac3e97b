"""The router's description: what it answers and lets through, nothing else, in a valid document."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octavo_engine.server.__main__ import derived
from octavo_router.docs.routes import router_document
from octavo_router.proxy.paths import PROXIED, describes_proxied
from tests.fakes.browser import browser_only, chromium, opened
from tests.fakes.http_client import RawClient
from tests.fakes.router_rig import on_loop
from tests.router.test_server import configuration, running

ROOT = Path(__file__).parents[3]
# Let through to engines of other makes only.
OF_OTHER_ENGINES = {"/v1/audio/transcriptions", "/v1/audio/translations"}


async def get(port: int, path: str) -> tuple[int, bytes, str]:
    async with await RawClient.open(port) as client:
        answer = await client.get(path)
    return answer.status, answer.body, answer.header("content-security-policy") or ""


@on_loop
async def test_the_page_and_the_document_are_served():
    async with running(configuration()) as (_, server):
        status, text, policy = await get(server.port, "/docs")
        assert status == 200 and b"openapi.json" in text
        assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
        status, text, _ = await get(server.port, "/openapi.json")
    document = json.loads(text)
    assert status == 200 and document["info"]["title"] == "Octavo router"
    assert next(iter(document["paths"])) == "/v1/chat/completions"
    assert "/" in document["paths"] and "/octavo/v1/drain" not in document["paths"]


@on_loop
async def test_without_the_console_there_is_no_page():
    off = configuration(text="server: {console: false}")
    async with running(off) as (_, server):
        assert (await get(server.port, "/docs"))[0] == 404


def test_every_route_to_engines_is_described_and_references_lead_somewhere():
    document = router_document(["/metrics"], "1.0")
    paths = document["paths"]
    assert {path for path in PROXIED if path not in paths} <= OF_OTHER_ENGINES
    assert all(describes_proxied(path) for path in paths if path.startswith("/v1/chat"))
    assert "/metrics" in paths and "/health" not in paths
    used = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert used == set(document["components"]["schemas"])
    ids = [each["operationId"] for methods in paths.values() for each in methods.values()]
    assert len(ids) == len(set(ids))


def test_what_engines_answer_is_what_their_tables_make():
    for path, text in derived().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, (
            "run python -m octavo_engine.server"
        )


@browser_only
@pytest.mark.slow
def test_the_page_lists_chat_first(platform):
    with chromium() as browser, opened(browser, platform.router.url + "/docs") as page:
        page.get_by_role("heading", name="Work").wait_for()
        assert page.locator("#routes code").first.inner_text() == "/v1/chat/completions"
