"""The page in a real browser, before a real router and real engines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.protocol.loading import LoadProgress
from octavo_router.console.pages import FILES
from tests.fakes.browser import accessibility_faults, browser_only, chromium, opened
from tests.fakes.engine import FakeEngine
from tests.fakes.http_client import RawClient
from tests.fakes.router_process import routing
from tests.fakes.router_rig import on_loop
from tests.fakes.server import running as serving
from tests.router.test_server import configuration, running

if TYPE_CHECKING:
    from collections.abc import Iterator


@on_loop
async def test_its_files_are_open_safe_and_complete():
    async with running(configuration()) as (_, server):
        for path, (_, kind) in FILES.items():
            async with await RawClient.open(server.port) as client:
                answer = await client.get(path)
            assert answer.status == 200
            assert answer.header("content-type") == kind
            assert "default-src 'none'" in (answer.header("content-security-policy") or "")
            assert b"http://" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"")
            assert b"https://" not in answer.body


@on_loop
async def test_it_can_be_switched_off():
    off = configuration(text="server: {console: false}")
    async with running(off) as (_, server), await RawClient.open(server.port) as client:
        assert (await client.get("/")).status == 404


@pytest.fixture  # of one test: while a browser is open, no other event loop runs in this thread
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, platform: Any) -> Iterator[Any]:
    with opened(browser, platform.router.url + "/") as page:
        page.wait_for_selector("#link[data-state=on]")
        yield page


@browser_only
def test_engines_and_requests_are_live(page, platform):
    assert page.locator("#engines tr").count() == 3
    assert page.locator("#engines .state.good").count() == 3
    body = {"model": "sim", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    answer = platform.router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    row = page.locator("#requests tr").first
    row.wait_for()
    assert "sim" in row.inner_text()
    assert "200" in row.inner_text()


@browser_only
def test_a_chat_streams_says_why_and_can_be_stopped(page):
    page.fill("#prompt", "Tell me something")
    page.fill("#max-tokens", "12")
    page.press("#prompt", "Enter")
    page.get_by_text("first token after").wait_for()
    assert "tokens per second" in page.locator("#speed").inner_text()
    answer = page.locator("#messages .answer").first.inner_text()
    assert len(answer) > 5
    assert "policy: prefix-load" in page.locator("#why").inner_text()
    page.fill("#prompt", "And now go on for long")
    page.fill("#max-tokens", "1500")
    page.click("#send")
    page.locator("#messages .answer p").nth(1).wait_for()
    page.click("#stop")
    page.get_by_text("[stopped]").wait_for()
    assert page.locator("#send").is_enabled()


@browser_only
def test_where_it_would_go_is_told_without_sending(page):
    page.click("#explain")
    page.get_by_text("nothing was sent").wait_for()
    assert page.locator("#why tbody tr").count() == 3
    assert "expected wait (s)" in page.locator("#why thead").inner_text()


@browser_only
def test_engines_are_named_by_host_and_requests_by_model(page, platform):
    name = page.locator("#engines td").first
    host, pool = name.inner_text().split("\n")
    assert (name.get_attribute("title"), pool) == (f"http://{host}", "default")
    platform.router.client.post("/v1/chat/completions", json={"messages": []})
    page.get_by_text("none given").first.wait_for()


@browser_only
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_fits_1280_pixels(browser, platform, scheme):
    with opened(browser, platform.router.url + "/", color_scheme=scheme) as page:
        page.wait_for_selector("#link[data-state=on]")
        page.fill("#prompt", "Hello")
        page.fill("#max-tokens", "5")
        page.press("#prompt", "Enter")
        page.get_by_text("first token after").wait_for()
        page.locator("#requests tr").first.wait_for()
        page.locator("summary").click()
        assert accessibility_faults(page) == []
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 1280
        page.locator("#why table").wait_for()
        hidden = "() => [...document.querySelectorAll('.scroll')].filter("
        hidden += "(each) => each.scrollWidth > each.clientWidth).map((each) => each.id)"
        assert page.evaluate(hidden) == [], "tables that are wider than their places"


@browser_only
def test_it_fits_a_phone_and_speaks_to_screen_readers(page):
    page.set_viewport_size({"width": 360, "height": 740})
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 360
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('input, select, textarea, button')]"
        ".filter((each) => !each.labels?.length && !each.textContent.trim()).map((each) => each.id)"
    )
    assert unnamed == []
    for name in ("Now", "Engines", "Chat", "Requests"):
        assert page.get_by_role("heading", name=name, exact=True).count() == 1


@pytest.mark.slow
@browser_only
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_engine_that_loads_says_how_far_it_is(browser, scheme):
    reported = LoadProgress("loading", int(1.2 * 2**30), int(3.9 * 2**30), 400 * 2**20)
    with (
        serving(FakeEngine(state="loading", progress=0.3, loading=reported)) as engine,
        routing("--upstreams", engine.url) as router,
    ):
        page = browser.new_page(color_scheme=scheme)
        page.set_default_timeout(15_000)
        page.goto(router.url + "/")
        page.get_by_text("loading weights: 1.2 of 3.9 GiB at 400.0 MiB/s, 7 s left").wait_for()
        assert page.get_by_label("30% loaded").is_visible()
        page.close()


@browser_only
def test_with_keys_on_it_asks_for_one(browser, platform, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        json.dumps({"server": {}, "flow": {"keys": [{"tenant": "t", "key": "secret"}]}})
    )
    with platform.another_router("--config", str(keys)) as router:
        page = browser.new_page()
        page.set_default_timeout(15_000)
        page.goto(router.url + "/")
        page.get_by_label("API key").wait_for()
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use it").click()
        page.wait_for_selector("#link[data-state=on]")
        page.close()
