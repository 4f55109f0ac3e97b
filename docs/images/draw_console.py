"""Draws the console's pictures: `python docs/images/draw_console.py` in a checkout, with Chromium.

Two engines and a router on this machine, a little traffic, one question in the page's chat.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent
QUESTION = "Write a short numbered list of three planets, each in bold, with one fact."
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"OCTAVO_HOME": home}
        octavo = Path(sys.executable).with_name("octavo")
        command = [octavo, "up", "demo://smollm2", "--replicas", "2", "--port", "8377", "--plain"]
        platform = subprocess.Popen(command, env=environment)
        try:
            draw("http://127.0.0.1:8377")
        finally:
            platform.terminate()
            platform.wait()


def draw(url: str) -> None:
    model = wait_until_ready(url)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: ask(url, model, number), range(24)))
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        for scheme, name in (("light", "console.png"), ("dark", "console-dark.png")):
            page = browser.new_page(
                viewport={"width": 1280, "height": 1000},
                color_scheme=scheme,  # type: ignore[arg-type]
            )
            page.goto(url + "/")
            page.wait_for_selector("#link[data-state=on]")
            page.fill("#temperature", "0")
            page.fill("#max-tokens", "90")
            page.fill("#prompt", QUESTION)
            page.click("#send")
            page.get_by_text("first token after").wait_for()
            page.wait_for_timeout(1500)
            page.screenshot(path=FOLDER / name)
            page.close()
        browser.close()


def wait_until_ready(url: str) -> str:
    """The name of its model."""
    for _ in range(240):
        try:
            if models := httpx.get(url + "/v1/models").json().get("data"):
                time.sleep(3)  # the second engine
                return str(models[0]["id"])
        except (httpx.TransportError, ValueError):
            pass
        time.sleep(0.5)
    raise TimeoutError("the platform was not ready in two minutes")


def ask(url: str, model: str, number: int) -> None:
    """Three conversations, so that prefixes are found again."""
    system = f"You are assistant number {number % 3}. " + "Answer in one short sentence. " * 20
    body = {
        "model": model,
        "max_tokens": 20,
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Say the number {number} in words."},
        ],
    }
    httpx.post(url + "/v1/chat/completions", json=body, timeout=120).raise_for_status()


if __name__ == "__main__":
    main()
