"""Markdown of the pages' chats, drawn by a real browser: blocks, emphasis, nothing that runs."""

from __future__ import annotations

import functools
import http.server
import threading
from typing import TYPE_CHECKING, Any

import pytest

from octavo_common import pages
from tests.fakes.browser import browser_only, chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = browser_only

CASES = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# Title #\ntext": "<h3>Title</h3><p>text</p>",
    "a **b** *c* ***d*** `e*f*`": (
        "<p>a <strong>b</strong> <em>c</em> <strong><em>d</em></strong> <code>e*f*</code></p>"
    ),
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    r"\*plain\*": "<p>*plain*</p>",
    "```python\nx = 1 < 2\n\n# no title\n```\nafter": (
        '<pre tabindex="0"><code>x = 1 &lt; 2\n\n# no title</code></pre><p>after</p>'
    ),
    "```\nstill open": '<pre tabindex="0"><code>still open</code></pre>',
    "- a\n- b\n  - c\n\n- d": "<ul><li>a</li><li><p>b</p><ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> quoted\n> *text*": "<blockquote><p>quoted\n<em>text</em></p></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "| a | b |\n|---|---|\n| 1 | `2` |": (
        "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>2</code></td></tr></table>"
    ),
    "| no table |": "<p>| no table |</p>",
    "[here](https://example.com/a)": (
        '<p><a href="https://example.com/a" target="_blank" rel="noopener noreferrer">here</a></p>'
    ),
    "[here](javascript:alert(1))": "<p>[here](javascript:alert(1))</p>",
    "<script>alert(1)</script><img src=x onerror=alert(1)>": (
        "<p>&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;</p>"
    ),
}


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """Has `markdown` as a global."""
    folder = str(pages.API_DOCS.parent)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        chromium() as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/chat.css")
        page.evaluate("async () => Object.assign(window, await import('/markdown.js'))")
        yield page
        server.shutdown()


def drawn(page: Any, text: str) -> str:
    script = """(text) => {
      const box = document.createElement("div");
      box.append(markdown(text));
      return box.innerHTML;
    }"""
    return str(page.evaluate(script, text))


@pytest.mark.parametrize("text", CASES)
def test_what_it_draws(page: Any, text: str) -> None:
    assert drawn(page, text) == CASES[text]


def test_every_beginning_of_an_answer_is_drawn(page: Any) -> None:
    """As it streams: no beginning may hang or fail, and no word may be lost."""
    text = "\n\n".join(CASES)
    for end in range(0, len(text), 7):
        drawn(page, text[:end])
    assert "after" in drawn(page, text)


def test_long_answers_are_drawn_in_time(page: Any) -> None:
    hostile = [
        "*" * 20_000,
        "`" * 20_001,
        "[" * 20_000,
        "- " * 5_000,
        "> " * 20_000,
        "|" * 20_000,
        "_a" * 10_000,
        "  " * 500 + "- a",
    ]
    for text in hostile:
        took_ms = page.evaluate(
            "(t) => { const b = performance.now(); markdown(t); return performance.now() - b; }",
            text,
        )
        assert took_ms < 2_000, text[:10]
