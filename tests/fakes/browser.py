"""A real browser for pages: Chromium through playwright, with axe-core for accessibility."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
browser_only = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="there is no Chromium here; `apt-get install chromium` brings it",
)
_SERIOUS = ("serious", "critical")


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page, about which the browser must have no complaint at the end."""
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.set_default_timeout(15_000)
    page.goto(url)
    yield page
    page.close()
    assert problems == []


def accessibility_faults(page: Any) -> list[str]:
    """What axe-core finds that is serious: the rule and the elements."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [
        f"{rule['id']}: {[node['target'] for node in rule['nodes']]}"
        for rule in found
        if rule["impact"] in _SERIOUS
    ]
