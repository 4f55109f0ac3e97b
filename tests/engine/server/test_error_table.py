"""The table of errors is true: each row is met, nothing else is raised, the page says the same."""

from __future__ import annotations

import ast
import errno
import json
import re
import socket
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import octavo_engine
from octavo_engine import errors
from octavo_engine.config import EngineConfig
from octavo_engine.core.media.held import HeldMedia
from octavo_engine.errors import (
    DeadlineExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    RequestError,
)
from octavo_engine.server.docs.pages import errors_page
from octavo_engine.server.http import errors as http_errors
from octavo_engine.server.http.errors import CATALOGUE, ROWS
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.fakes.certificates import make_authority
from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, post, running
from tests.tools.source_trees import parsed_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"prompt": "a", "max_tokens": 9}
SOURCES = Path(octavo_engine.__file__).parent
ROOT = Path(__file__).parents[3]

Met = tuple[int, dict[str, str], dict[str, Any]]  # status, headers, error


def of(answer: Any) -> Met:
    return answer.status_code, dict(answer.headers), answer.json()["error"]


def of_bytes(answer: bytes) -> Met:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, json.loads(body)["error"]


def requested(
    path: str = COMPLETIONS, body: Any = HELLO, *, method: str = "POST",
    engine: FakeEngine | None = None, headers: dict[str, str] | None = None, **settings: Any,
) -> Callable[[], Met]:  # fmt: skip
    def meet() -> Met:
        with running(engine, ServerSettings(**settings)) as server, server.client() as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            kept = {"content-type": "application/json"} | (headers or {})
            return of(client.request(method, path, content=content, headers=kept))

    return meet


def sent(data: bytes, **settings: Any) -> Callable[[], Met]:
    def meet() -> Met:
        with running(settings=ServerSettings(**settings)) as server:
            return of_bytes(server.raw(data))

    return meet


def failing(error: RequestError | Exception) -> Callable[[], Met]:
    return requested(engine=FakeEngine(error=error))


def in_state(state: str) -> Callable[[], Met]:
    return requested(engine=FakeEngine(state=state))


def while_one_is_held(
    server: RunningServer, then: Callable[[socket.socket], Met], path: str = COMPLETIONS,
    body: Any = HELLO,
) -> Met:  # fmt: skip
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(post(path, json.dumps(body).encode(), "x-request-id: held"))
        server.wait_for(server.engine.holding)
        return then(connection)


def full() -> Met:
    settings = ServerSettings(limits=RequestLimits(max_concurrent_requests=1))
    engine = FakeEngine(hold_after=0)
    engine.stats.queued_tokens, engine.stats.prefill_tokens_per_s = 1000, 150.0
    with running(engine, settings) as server, server.client() as client:
        met = while_one_is_held(server, lambda _: of(client.post(COMPLETIONS, json=HELLO)))
    assert met[1]["retry-after"] == "7"  # 1000 tokens at 150 a second
    return met


def aborted() -> Met:
    engine = FakeEngine(hold_after=1, tasks=("embed",))
    with running(engine) as server, server.client() as client:

        def stop(connection: socket.socket) -> Met:
            client.post("/abort_requests", json={"request_ids": ["held"]}).raise_for_status()
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
            return of_bytes(answer)

        return while_one_is_held(server, stop, "/v1/embeddings", {"input": "a"})


def asleep() -> Met:
    with running(settings=ServerSettings(dev_mode=True)) as server, server.client() as client:
        client.post("/sleep").raise_for_status()
        return of(client.post(COMPLETIONS, json=HELLO))


def draining() -> Met:
    with running() as server, server.client() as client:
        client.post("/octavo/v1/drain").raise_for_status()
        return of(client.post(COMPLETIONS, json=HELLO))


def disk_full() -> Met:
    def write(_: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        tempfile.TemporaryDirectory() as folder,
        running(settings=ServerSettings(files_dir=folder)) as server,
        server.client() as client,
    ):
        assert server.service.batches is not None
        server.service.batches.shelf.storage.write = write  # type: ignore[method-assign,assignment]
        files = {"file": ("a", b"123456")}
        return of(client.post("/v1/files", data={"purpose": "batch"}, files=files))


def without_a_certificate() -> Met:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_authority(folder, ("engine",))
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        settings = ServerSettings(
            ssl_certfile=str(folder / "engine.pem"), ssl_keyfile=str(folder / "engine.key"),
            ssl_ca_certs=str(folder / "ca.pem"), ssl_cert_reqs="protected",
        )  # fmt: skip
        with running(settings=settings) as server, server.client(verify=context) as client:
            return of(client.post(COMPLETIONS, json=HELLO))


def from_a_page() -> Met:
    """At the administrators' listener."""
    settings = ServerSettings(admin_port=1)
    with running(settings=settings) as server, server.admin() as client:
        return of(client.post("/octavo/v1/drain", headers={"origin": "https://app.example"}))


def not_held() -> Met:
    """As a model that sees answers a uuid that came without its picture."""
    with pytest.raises(InvalidRequest) as raised:
        HeldMedia().find(b"", "red", "messages.0.content.1.image_url")
    return failing(raised.value)()


def keeping_files(
    path: str, method: str = "GET", limits: RequestLimits | None = None, **request: Any
) -> Callable[[], Met]:
    def meet() -> Met:
        with tempfile.TemporaryDirectory() as folder:
            settings = ServerSettings(files_dir=folder, limits=limits or RequestLimits())
            with running(settings=settings) as server, server.client() as client:
                return of(client.request(method, path, **request))

    return meet


MEET: dict[str, Callable[[], Met]] = {
    "invalid_request": requested(body={"prompt": "a", "n": 0}),
    "invalid_json": requested(body=b"{"),
    "invalid_header": requested(headers={"x-octavo-timeout-ms": "soon"}),
    "invalid_http": sent(b"nonsense\r\n\r\n"),
    "context_length_exceeded": requested(body={"prompt": "a" * 300}),
    "not_supported": requested(body=HELLO | {"prompt_embeds": "AAAA"}),
    "unknown_field": requested(
        body=HELLO | {"temprature": 1}, limits=RequestLimits(strict_fields=True)
    ),
    "wrong_task": requested("/v1/embeddings", {"input": "a"}),
    "aborted": aborted,
    "grammar_timeout": failing(InvalidRequest("too hard", param="response_format",
                                              code="grammar_timeout")),
    "grammar_queue_full": failing(QueueFull("too many", code="grammar_queue_full",
                                            retry_after_s=5)),
    "media_not_held": not_held,
    "client_certificate_required": without_a_certificate,
    "invalid_api_key": requested(api_keys=("k",)),
    "admin_key_required": requested("/octavo/v1/drain", headers={"x-api-key": "k"}, api_keys=("k",),
                                admin_api_keys=("boss",)),
    "page_refused": from_a_page,
    "model_not_found": requested(body=HELLO | {"model": "other"}),
    "route_not_found": requested("/v2/completions"),
    "method_not_allowed": requested(method="PUT"),
    "body_timeout": sent(post(COMPLETIONS, b"{}").replace(b"length: 2", b"length: 9"),
                         limits=RequestLimits(body_timeout_s=0.05)),
    "body_too_large": requested(
        body={"prompt": "a" * 2000}, limits=RequestLimits(max_body_bytes=1000)
    ),
    "url_too_long": requested("/health?" + "a" * 500, method="GET",
        limits=RequestLimits(max_url_bytes=500)),
    "unsupported_media_type": requested(headers={"content-type": "text/plain"}),
    "previous_response_not_found": requested(
        "/v1/responses", {"input": "a", "previous_response_id": "resp_x"}
    ),
    "response_not_found": requested("/v1/responses/resp_x", b"", method="GET"),
    "file_not_found": keeping_files("/v1/files/file-x"),
    "batch_not_found": keeping_files("/v1/batches/batch_x"),
    "file_storage_full": keeping_files(
        "/v1/files", "POST", RequestLimits(max_stored_file_bytes=5), data={"purpose": "batch"},
        files={"file": ("a", b"123456")},
    ),
    "disk_full": disk_full,
    "wrong_pod": requested(headers={"x-octavo-pod-uid": "b"}, pod_uid="a"),
    "headers_too_large": requested(headers={"x": "y" * 3000},
        limits=RequestLimits(max_header_bytes=2000)),
    "internal_error": failing(ZeroDivisionError("at 0x7f00deadbeef in /srv/secret.py")),
    "model_error": failing(GenerationFailed("the logits of layer 3 are not finite")),
    "not_implemented": requested("/v1/realtime", b"", method="GET"),
    "adapters_fixed": requested("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    "adapter_not_found": requested("/v1/unload_lora_adapter", {"lora_name": "a"},
        engine=FakeEngine(config=EngineConfig(model="fake", device="sim", enable_lora=True)),
        allow_runtime_lora_updating=True),
    "queue_full": full,
    "loading": in_state("loading"),
    "draining": draining,
    "sleeping": asleep,
    "server_shutdown": failing(EngineDead("The server ends.", code="server_shutdown",
                                          retry_after_s=1)),
    "engine_stalled": in_state("stalled"),
    "engine_dead": in_state("dead"),
    "deadline_exceeded": failing(DeadlineExceeded("the deadline passed")),
    "http_version": sent(b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n"),
}  # fmt: skip


def test_every_row_is_met_below():
    assert set(MEET) == set(ROWS)
    assert len(ROWS) == len(CATALOGUE)


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: row.code)
def test_a_row_says_what_clients_see(row):
    status, headers, error = MEET[row.code]()

    assert (status, error["type"], error["code"]) == (row.status, row.type, row.code)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if not row.param:
        assert error["param"] is None
    elif not row.param.endswith("to blame"):
        assert error["param"]
    if row.retry_after:
        assert 1 <= int(headers["retry-after"]) <= 60
    else:
        assert "retry-after" not in headers
    assert headers["content-type"] == "application/json"
    if row.code not in ("invalid_http", "http_version", "url_too_long", "headers_too_large"):
        # of these no request is known yet
        assert headers["x-request-id"]


def test_a_fault_of_ours_tells_nothing_of_its_inside():
    _, _, error = MEET["internal_error"]()
    assert error["message"] == http_errors.OUR_FAULT


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fault",
    [
        GenerationFailed("broken numbers"),
        EngineDead("it is down"),
        DeadlineExceeded("too late"),
        QueueFull("full"),
        ZeroDivisionError("secret"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_broken_stream_carries_the_same_object_and_ends(path, fault):
    body: dict[str, Any] = {"stream": True, "ignore_eos": True, "max_tokens": 9}
    body |= (
        {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    )
    engine = FakeEngine(error=fault, news_before_error=3)
    with running(engine) as server, server.client() as client:
        answer = client.post(path, json=body)
        server.wait_until_idle()
        whole = client.post(path, json=body | {"stream": False})

    assert answer.status_code == 200
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    error = json.loads(frames[-2].removeprefix("data: "))
    assert error == whole.json()
    assert whole.status_code == ROWS[error["error"]["code"]].status
    assert "secret" not in answer.text
    assert all("error" not in json.loads(frame.removeprefix("data: ")) for frame in frames[:-2])


# ── the sources ──


def parsed(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """The sources that have one of the words; without words all."""
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text(encoding="utf-8") if words else ""
        if not words or any(word in text for word in words):
            yield str(path.relative_to(SOURCES)), parsed_source(path)


def raised() -> Iterator[tuple[str, str, int | None, str | None]]:
    """Place, code, and what is said of status and type, of every error made with a code."""
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, RequestError)
    }
    for place, tree in parsed("code=", "unavailable("):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            code = next((k.value for k in node.keywords if k.arg == "code"), None)
            if name == "unavailable":
                code = node.args[0]
            if not isinstance(code, ast.Constant) or not isinstance(code.value, str):
                continue
            where = f"{place}:{node.lineno}"
            if name == "HttpError" and isinstance(node.args[0], ast.Constant):
                yield where, code.value, int(str(node.args[0].value)), None
            elif name == "unavailable":
                yield where, code.value, 503, "server_error"
            elif name in classes:
                yield where, code.value, classes[name].status, classes[name].type
    for name, kind in classes.items():
        if kind.code is not None:
            yield f"errors.{name}", kind.code, kind.status, kind.type


def test_nothing_is_raised_that_is_not_in_the_table():
    found = list(raised())
    assert len(found) > 25
    for where, code, status, type_ in found:
        assert code in ROWS, where
        assert status in (None, ROWS[code].status), where
        assert type_ in (None, ROWS[code].type), where


@pytest.mark.slow
def test_nothing_is_in_the_table_that_is_never_raised():
    words: set[str] = set()
    table: set[int] = set()  # its own words do not count
    trees = list(parsed())  # all kept: the id of a node that is gone may come again
    for _, tree in trees:
        for node in ast.walk(tree):  # parents before children
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ErrorRow":
                table |= {id(word) for word in node.args}
            elif isinstance(node, ast.Constant) and id(node) not in table:
                words.add(str(node.value))
    assert set(ROWS) <= words


def test_the_page_is_what_the_table_makes():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page == errors_page(), "run python -m octavo_engine.server"
    assert len(re.findall(r"^\| \d{3} ", page, re.M)) == len(CATALOGUE)
