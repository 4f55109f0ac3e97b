"""The description is complete and true: every route is in it, and real answers are as it says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import jsonschema_rs
import pytest

from octavo_common.pages import CHAT_FILES
from octavo_engine.server.docs.openapi import document, errors_of, section, without_converters
from octavo_engine.server.docs.pages import api_page
from octavo_engine.server.http.errors import CATALOGUE
from octavo_engine.server.routes import ROUTES
from octavo_engine.server.settings import ServerSettings
from tests.fakes.api_fuzz import Contract
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running
from tests.fakes.simulated import simulating

ROOT = Path(__file__).parents[4]
USER = [{"role": "user", "content": "hi"}]
DOCUMENT = document(ROUTES)
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def test_every_route_is_described():
    described = {
        (method.upper(), path) for path, inside in DOCUMENT["paths"].items() for method in inside
    }
    assert described == {(row.method, without_converters(row.path)) for row in ROUTES}
    for row in ROUTES:
        assert row.says, row.path
        operation = DOCUMENT["paths"][without_converters(row.path)][row.method.lower()]
        assert ("requestBody" in operation) is bool(row.body or row.form), row.path
        if row.access == "public":
            assert operation["security"] == []
        else:
            assert {"key": []} in operation["security"], row.path
        known = {error.status for error in CATALOGUE}
        assert set(errors_of(row)) <= known, row.path


@pytest.mark.slow
def test_what_a_switch_turns_off_is_neither_served_nor_described():
    with running() as server, server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
        for row in ROUTES:
            if row.needs and row.needs != "docs":
                assert row.path not in paths
                assert client.request(row.method, row.path).status_code == 404
    with running(settings=ServerSettings(docs=False)) as server, server.client() as client:
        for path in ("/", "/openapi.json", "/docs"):
            assert client.get(path).status_code == 404


def test_operation_ids_are_unique_and_references_lead_somewhere():
    ids = [o["operationId"] for inside in DOCUMENT["paths"].values() for o in inside.values()]
    assert len(ids) == len(set(ids))
    for ref in re.findall(r'"\$ref": "([^"]+)"', json.dumps(DOCUMENT)):
        at = DOCUMENT
        for part in ref.removeprefix("#/").split("/"):
            at = at[part]
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": DIALECT} | schema)


def test_the_page_of_the_interface_is_what_the_table_makes():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == api_page(ROUTES), "run python -m octavo_engine.server"
    anchors = {title.lower() for title in re.findall(r"^### (\S+)$", page, re.M)}
    for link in re.findall(r"\]\(#([\w.]+)\)", page):
        assert link in anchors, link


# ── answers ──

TEXT = {"prompt": "once", "max_tokens": 4}
CHAT = {"messages": USER, "max_tokens": 4}
RESPONSE = {"input": "hi", "max_output_tokens": 4}
EVERYTHING = {"n": 2, "temperature": 1.0, "return_token_ids": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ASKED = [
    ("POST", "/v1/completions", TEXT),
    ("POST", "/v1/completions", TEXT | EVERYTHING | {"logprobs": 2, "prompt_logprobs": 1}),
    ("POST", "/v1/completions", TEXT | {"echo": True, "logprobs": 1, "prompt": ["a b", "c d"]}),
    ("POST", "/v1/completions", TEXT | EVERYTHING | STREAM | {"logprobs": 2}),
    ("POST", "/v1/completions", {"prompt": 1}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | EVERYTHING | {"logprobs": True, "top_logprobs": 2}),
    ("POST", "/v1/chat/completions", CHAT | {"prompt_logprobs": 1}),
    ("POST", "/v1/chat/completions", CHAT | EVERYTHING | STREAM | {"logprobs": True}),
    ("POST", "/v1/chat/completions", CHAT | {"tools": []}),
    ("POST", "/v1/responses", RESPONSE),
    ("POST", "/v1/responses", RESPONSE | {"stream": True, "top_logprobs": 2, "store": False}),
    ("POST", "/v1/responses", RESPONSE | {"background": True}),
    ("POST", "/v1/responses", {"input": [{"type": "web_search_call"}]}),
    ("GET", "/v1/responses/resp_1", None),
    ("DELETE", "/v1/responses/resp_1", None),
    ("POST", "/v1/responses/resp_1/cancel", None),
    ("GET", "/v1/responses/resp_1/input_items", None),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/messages", CHAT | {"stream": True}),
    ("POST", "/v1/messages", {"messages": USER}),
    ("POST", "/v1/messages/count_tokens", {"messages": USER}),
    ("POST", "/v1/chat/completions/render", CHAT),
    ("POST", "/v1/completions/render", TEXT),
    ("POST", "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
    ("POST", "/tokenize", {"prompt": "once", "return_token_strs": True}),
    ("POST", "/tokenize", {}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/v1/embeddings", {"input": "a"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    ("POST", "/abort_requests", {"request_ids": ["x"]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/sim", None),
    ("GET", "/v1/models/other", None),
    ("GET", "/load", None),
    ("GET", "/ping", None),
    ("GET", "/tokenizer_info", None),
    ("GET", "/is_sleeping", None),
    ("GET", "/server_info", None),
    ("GET", "/health", None),
    ("GET", "/livez", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/docs", None),
    ("GET", "/", None),
]


@pytest.fixture(scope="module")
def simulated():
    settings = ServerSettings(dev_mode=True, tokenizer_info=True)
    with simulating(settings=settings) as server, httpx.Client(timeout=20) as client:
        contract = Contract(client.get(server.url + "/openapi.json").json())
        yield server, client, contract


@pytest.mark.parametrize(("method", "path", "body"), ASKED, ids=lambda value: str(value)[:50])
def test_answers_are_as_described(simulated, method, path, body):
    server, client, contract = simulated
    answer = client.request(method, server.url + path, json=body)

    template = path.replace("resp_1", "{response_id}")
    template = "/v1/models/{model}" if path.startswith("/v1/models/") else template
    contract.check(method, template, answer)
    is_found = method == "GET" and path != "/v1/models/other" and "resp_1" not in path
    if body in (TEXT, CHAT, RESPONSE) or is_found:
        assert answer.status_code == 200


def test_the_judge_can_say_no(simulated):
    _, _, contract = simulated
    request = httpx.Request("GET", "http://x/version")

    def answer(status: int, body: object) -> httpx.Response:
        return httpx.Response(status, json=body, request=request)

    contract.check("GET", "/version", answer(200, {"version": "1"}))
    for bad in (answer(200, {"version": 1}), answer(200, {}), answer(418, {"version": "1"}),
                answer(200, {"version": "1", "more": 1}), answer(500, {"error": "x"})):  # fmt: skip
        with pytest.raises(AssertionError):
            contract.check("GET", "/version", bad)


EMBEDDED = [
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["float", "binary"]}),
    ("/pooling", {"input": "a"}),
    ("/pooling", {"input": "a", "task": "token_embed"}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v2/rerank", {"query": "a", "documents": ["b", "c"], "return_documents": True}),
    ("/classify", {"input": ["a"]}),
]


def test_answers_of_pooling_are_as_described():
    contract = Contract(DOCUMENT)
    tasks = ("embed", "token_embed", "classify")
    with running(FakeEngine(tasks=tasks)) as server, server.client() as client:
        for path, body in EMBEDDED:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            contract.check("POST", path, answer)


# ── /docs ──


class Page(HTMLParser):
    """Whatever the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href"):
                self.fetched.append(value or "")
            if name == "id":
                self.ids.add(value or "")


@pytest.mark.parametrize(("path", "most_lines"), [("/docs", 200), ("/", 120)])
def test_a_page_needs_no_other_host_and_no_script_but_its_own(path, most_lines):
    with running() as server, server.client() as client:
        answer = client.get(path)
    page = Page()
    page.feed(answer.text)

    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert set(page.fetched) <= {"data:,", "docs", "metrics", "v1/models", "console/chat.css"}
    assert "//" not in re.sub(r"//.*", "", answer.text).replace("://", "")
    assert not re.search(r"https?://", answer.text)
    script = answer.text + ("" if path == "/docs" else (CHAT_FILES["chat.js"][0]).read_text())
    for wanted in re.findall(r'(?:getElementById|\$)\("([\w-]+)"\)', script):
        assert wanted in page.ids
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert "unsafe" not in policy
    assert len(answer.text.splitlines()) < most_lines


def test_the_files_of_its_chat_are_served_to_everyone():
    with (
        running(settings=ServerSettings(api_keys=("secret",))) as server,
        server.client() as client,
    ):
        for name, (path, kind) in CHAT_FILES.items():
            answer = client.get(f"/console/{name}")
            assert answer.content == path.read_bytes()
            assert answer.headers["content-type"] == kind
        for name in ("other.js", "..%2fpages.py", "__init__.py"):
            assert client.get(f"/console/{name}").status_code == 404


def test_chat_is_described_first():
    (first, *_), sections = DOCUMENT["paths"], [section(row) for row in ROUTES]
    assert (first, sections[0]) == ("/v1/chat/completions", "Work")
