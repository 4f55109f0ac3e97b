"""The engine's page at `/` in a real browser, before a simulated engine."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.config import EngineConfig, SimConfig
from octavo_engine.server.settings import ServerSettings
from tests.fakes.browser import accessibility_faults, browser_only, chromium, opened
from tests.fakes.simulated import simulating

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = EngineConfig(
    model="sim", device="sim", served_model_names=("sim",), max_model_len=4096,
    sim=SimConfig(kv_blocks=512, step_base_ms=4),
)  # fmt: skip
pytestmark = [browser_only, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with simulating(CONFIG) as server:
        yield server


@pytest.fixture
def page(browser: Any, server: Any) -> Iterator[Any]:
    with opened(browser, server.url + "/") as page:
        page.get_by_text("version ").wait_for()
        yield page


def test_a_chat_streams_and_counts_tokens(page):
    page.fill("#prompt", "Tell me something")
    page.fill("#max-tokens", "12")
    page.press("#prompt", "Enter")
    page.get_by_text("tokens per second").wait_for()
    assert len(page.locator("#messages .answer").inner_text()) > 5
    page.click("#clear")
    assert page.locator("#messages p").count() == 0


def test_an_answer_can_be_stopped(page):
    page.fill("#prompt", "And now go on for long")
    page.fill("#max-tokens", "1500")
    page.click("#send")
    page.locator("#messages .answer p").wait_for()
    page.click("#stop")
    page.get_by_text("[stopped]").wait_for()
    assert page.locator("#send").is_enabled()


def test_the_curl_command_is_the_request(page):
    page.fill("#prompt", "What's up?")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "3")
    page.locator("summary").click()
    command = page.inner_text("#curl")
    assert '"temperature": 0' in command
    words = [*shlex.split(command), "--silent", "--fail"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert '"completion_tokens":3' in done.stdout.replace(" ", "")


def test_a_picture_goes_with_one_message(browser, server, tmp_path):
    picture = tmp_path / "dot.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(4000))
    page = browser.new_page()  # which may complain: the simulated model takes no pictures
    page.set_default_timeout(15_000)
    page.goto(server.url + "/")
    page.get_by_text("version ").wait_for()
    page.set_input_files("#picture", picture)
    page.get_by_text("dot.png goes with the next message").wait_for()
    page.locator("summary").click()
    assert "data:image/png;base64," in page.inner_text("#curl")
    assert "characters)" in page.inner_text("#curl")
    page.fill("#prompt", "What is this?")
    page.click("#send")
    page.get_by_text("this model takes no pictures").wait_for()
    assert page.locator("#messages .user img").get_attribute("src").startswith("data:image/png")
    assert "image_url" not in page.inner_text("#curl")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_fits_a_phone(browser, server, scheme):
    with opened(browser, server.url + "/", color_scheme=scheme) as page:
        page.get_by_text("version ").wait_for()
        page.fill("#prompt", "Hello")
        page.fill("#max-tokens", "5")
        page.press("#prompt", "Enter")
        page.get_by_text("tokens per second").wait_for()
        assert accessibility_faults(page) == []
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 360


def test_with_keys_it_has_a_field_for_one(browser):
    with simulating(settings=ServerSettings(api_keys=("secret",))) as server:
        page = browser.new_page()
        page.set_default_timeout(15_000)
        page.goto(server.url + "/")
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use it").click()
        page.get_by_text("version ").wait_for()
        page.locator("summary").click()
        assert "$OCTAVO_API_KEY" in page.inner_text("#curl")
        page.close()


def test_its_links_lead_to_pages(page, server):
    page.get_by_role("link", name="HTTP interface").click()
    page.get_by_role("heading", name="Work").wait_for()
    assert page.url == server.url + "/docs"
    assert page.locator("#routes code").first.inner_text() == "/v1/chat/completions"
