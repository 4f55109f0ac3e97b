"""Defects of other servers that no test of a single part shows: each test is named after one."""

from __future__ import annotations

import random
import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

from octavo_engine.server.settings import ServerSettings
from octavo_router.config.settings import KeyConfig
from octavo_router.flow.keys import make_table
from release import audit
from tests.fakes.process import serving
from tests.fakes.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

ROOT = Path(__file__).parents[1]
# The first version without the defect that was published about an older one.
FIRST_GOOD = {
    "aiohttp": "3.14.3", "h11": "0.16.0", "jinja2": "3.1.6", "msgspec": "0.20",
    "starlette": "1.3.1",
}  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_no_locked_package_has_a_published_defect_in_what_we_use_of_it():
    """h11 (chunked bodies, CVE-2025-43859), starlette (`Range`, CVE-2025-62727), aiohttp, jinja2
    (sandbox escapes)."""
    seen = set()
    for file in sorted((ROOT / "images").glob("*.txt")):
        for package in audit.locked(file.read_text(encoding="utf-8"), file.name):
            if (least := FIRST_GOOD.get(package.name)) is not None:
                assert Version(package.version) >= Version(least), package
                seen.add(package.name)
    assert seen == set(FIRST_GOOD)


@pytest.mark.parametrize("shared", [8, 64, 256])
def test_keys_that_begin_alike_are_different_keys(shared: int):
    """CVE-2026-35030: a cache of credentials went by their first 64 bytes, so that one client got
    the rights of another."""
    begin = "e" * shared
    table = make_table(
        [KeyConfig(tenant="a", key=f"{begin}1"), KeyConfig(tenant="b", key=f"{begin}2")], {}
    )
    tenants = {digest: limits.tenant for digest, limits in table.limits.items()}
    assert tenants[sha256(f"{begin}1".encode()).digest()] == "a"
    assert tenants[sha256(f"{begin}2".encode()).digest()] == "b"
    assert sha256(begin.encode()).digest() not in tenants


@pytest.mark.slow
def test_whatever_stands_in_authorization_opens_nothing(caplog: pytest.LogCaptureFixture):
    """CVE-2026-42208: a credential that reached a query. Here it is bytes, compared by digest."""
    caplog.set_level("DEBUG")
    draw = random.Random(42208)
    key = secrets.token_hex(8)
    with running(settings=ServerSettings(api_keys=(key,))) as server, server.client() as client:
        good = client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert good.status_code == 200
        for value in _credentials(draw, key):
            headers = {"authorization": value}
            answer = client.get("/v1/models", headers=headers)  # type: ignore[arg-type]  # bytes
            assert answer.status_code in (400, 401), value
            assert "OR 1=1" not in answer.text and "canary" not in answer.text
    assert "canary" not in caplog.text and key not in caplog.text


def _credentials(draw: random.Random, key: str) -> Iterator[bytes]:
    yield from (
        b"Bearer ' OR 1=1 --", b"Bearer canary'; DROP TABLE keys; --", b"Bearer ${jndi:canary}",
        b"Bearer %s", b"Bearer " + b"A" * 4096, b"Bearer", b"", b"bearer\tx", b"Bearer None",
        b"Bearer " + key[:-1].encode(), b"Bearer " + key.encode() + b"x", b"Basic " + key.encode(),
        b"Bearer " + key.upper().encode() + b"!", b"Bearer \xff\xfe canary", b"Token null",
    )  # fmt: skip
    for _ in range(400):
        length = draw.randrange(1, 40)
        yield b"Bearer canary" + bytes(draw.choice(range(0x21, 0x100)) for _ in range(length))


def requests() -> list[tuple[str, dict[str, str], Any]]:
    """What an assertion may be all that stands against."""
    said = [{"role": "user", "content": "hi"}]
    chat: dict[str, Any] = {"model": "m", "messages": said, "max_tokens": 2}
    prompt: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 2}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}}
    wrong: list[tuple[str, Any]] = [
        (CHAT, chat), (COMPLETIONS, prompt), (COMPLETIONS, {**prompt, "prompt": ""}),
        (COMPLETIONS, {**prompt, "prompt": []}), (COMPLETIONS, {**prompt, "prompt": [2**31]}),
        (COMPLETIONS, {**prompt, "prompt": [-1]}), (COMPLETIONS, {**prompt, "max_tokens": -1}),
        (COMPLETIONS, {**prompt, "max_tokens": 2**63}), (COMPLETIONS, {**prompt, "n": 10**6}),
        (COMPLETIONS, {**prompt, "n": 0}), (COMPLETIONS, {**prompt, "top_p": 0}),
        (COMPLETIONS, {**prompt, "temperature": -1}), (COMPLETIONS, {**prompt, "logprobs": 10**6}),
        (COMPLETIONS, {**prompt, "logit_bias": {"99999999": 1}}),
        (COMPLETIONS, {**prompt, "stop_token_ids": [-5]}),
        (COMPLETIONS, {**prompt, "prompt_embeds": "AAAA"}),
        (COMPLETIONS, {**prompt, "structured_outputs": {"regex": "((("}}),
        (COMPLETIONS, {**prompt, "prompt": ["a"] * 100_000}),
        (CHAT, {**chat, "messages": []}), (CHAT, {**chat, "response_format": schema}),
        (CHAT, {**chat, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {**chat, "chat_template": "{{ 1 }}"}), (CHAT, {**chat, "tools": [{}]}),
        ("/v1/load_lora_adapter", {"lora_name": "../x", "lora_path": "/etc"}),
        ("/v1/audio/transcriptions", prompt), ("/sleep", {}), ("/collective_rpc", {"method": "x"}),
    ]  # fmt: skip
    keyed = [(path, {"authorization": "Bearer k"}, body) for path, body in wrong]
    return [*keyed, *((path, {}, body) for path, body in wrong[:3])]


@pytest.mark.slow
def test_no_check_is_an_assertion_that_an_optimised_interpreter_leaves_out():
    """CVE-2026-41523: checks were `assert`, and PYTHONOPTIMIZE removed them."""
    answers = []
    for level in ("", "2"):
        with (
            serving("m", "--served-model-name", "m", "--api-key", "k",
                    env={"PYTHONOPTIMIZE": level}) as server,
            server.client() as client,
        ):  # fmt: skip
            answers.append([_answer(client, *request) for request in requests()])
            assert client.get("/health").status_code == 200
    assert answers[0] == answers[1]
    assert {200, 400, 401} <= {status for status, _ in answers[0]}


def _answer(client: httpx.Client, path: str, headers: dict[str, str], body: Any) -> tuple[int, str]:
    answer = client.post(path, headers=headers, json=body)
    assert answer.status_code < 500 or answer.status_code == 501, (path, answer.text)
    if answer.status_code == 200:
        return 200, ""
    return answer.status_code, re.sub(r"[0-9a-f]{8,}", "…", answer.text)
