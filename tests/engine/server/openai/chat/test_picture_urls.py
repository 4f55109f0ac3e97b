"""Pictures by https: and file: URLs through the API, under the flags that allow them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from octavo_common.tls import client_context
from octavo_engine.core.media.fetch import PictureFetcher
from octavo_engine.errors import ConfigError
from octavo_engine.server.settings import ServerSettings
from tests.engine.server.openai.chat.test_pictures import RED, Rig, logprobs, picture, text
from tests.fakes.certificates import make_authority
from tests.fakes.picture_host import PictureHost, redirect, response
from tests.fakes.seeing import encoded, write_seeing_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS = text("what colour is it ?")


def by_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    make_authority(root / "ca")
    write_seeing_model(root / "llava")
    (root / "allowed").mkdir()
    (root / "allowed" / "red.png").write_bytes(RED)
    (root / "secret.png").write_bytes(RED)
    return root


@pytest.fixture(scope="module")
def rig(root: Path) -> Iterator[Rig]:
    rig = Rig(
        root / "llava",
        allowed_media_domains=("localhost",),
        allowed_local_media_path=str(root / "allowed"),
    )
    rig._app.state.service.picture_sources._fetcher = PictureFetcher(
        ("localhost",),
        _is_allowed="127.0.0.1".__eq__,
        _context=client_context(str(root / "ca" / "ca.pem")),
    )
    yield rig
    rig.close()


@pytest.fixture
def host(rig: Rig, root: Path) -> Iterator[PictureHost]:
    serving = PictureHost().serving(root / "ca")
    yield rig.runner.run(serving.__aenter__())
    rig.runner.run(serving.__aexit__(None, None, None))


def test_the_answer_is_that_of_the_picture_itself(rig: Rig, root: Path, host: PictureHost) -> None:
    host.responses["/red.png"] = response(RED)
    host.responses["/blue.png"] = response(encoded(Image.new("RGB", (80, 60), "blue")))
    host.responses["/moved"] = redirect("/red.png")
    expected = logprobs(rig.chat(picture(RED), WORDS))
    file = f"file://{root}/allowed/red.png"
    for url in (host.url("/red.png"), host.url("/moved"), file):
        assert logprobs(rig.chat(by_url(url), WORDS)) == expected
    assert logprobs(rig.chat(by_url(host.url("/blue.png")), WORDS)) != expected
    mixed = rig.chat(by_url(host.url("/blue.png")), by_url(file), picture(RED))
    assert (
        mixed["usage"]["prompt_tokens"] == rig.chat(*[picture(RED)] * 3)["usage"]["prompt_tokens"]
    )


def test_other_endpoints_read_the_same_urls(rig: Rig, host: PictureHost) -> None:
    host.responses["/red.png"] = response(RED)
    url = host.url("/red.png")
    num_tokens = rig.chat(picture(RED), text("what"))["usage"]["prompt_tokens"]
    message = {"role": "user", "content": [by_url(url), text("what")]}
    status, answer = rig.post("/tokenize", {"messages": [message]})
    assert (status, answer.get("count")) == (200, num_tokens)
    block = {"type": "image", "source": {"type": "url", "url": url}}
    body = {
        "model": rig.engine.info.names[0], "max_tokens": 5,
        "messages": [{"role": "user", "content": [block, text("what")]}],
    }  # fmt: skip
    status, answer = rig.post("/v1/messages", body)
    assert status == 200, answer
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what"}]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 16}
    status, answer = rig.post("/v1/responses", body)
    assert (status, answer["usage"]["input_tokens"]) == (200, num_tokens)


def test_refusals_name_the_part(rig: Rig, root: Path, host: PictureHost) -> None:
    host.responses["/page"] = response(b"<html>", kind="text/html")
    host.responses["/text"] = response(b"no picture")
    for url, message in (
        ("https://other.example/a.png", "other.example is not among --allowed-media-domains"),
        ("http://localhost/a.png", "pictures are not fetched from 'http' URLs"),
        (host.url("/page"), "its host sends 'text/html'"),
        (host.url("/text"), "is none of the formats"),
        (f"file://{root}/secret.png", "below one folder only"),
    ):
        refusal = rig.refusal(WORDS, by_url(url))
        assert refusal.startswith("messages[0].content[1].image_url") and message in refusal


def test_pictures_of_a_request_share_the_size_of_a_body(rig: Rig, host: PictureHost) -> None:
    half = encoded(Image.new("RGB", (80, 60))) + bytes(5 << 20)
    host.responses["/half.bmp"] = response(half)
    part = by_url(host.url("/half.bmp"))
    rig.chat(part, WORDS)
    assert f"more than {8 << 20} bytes" in rig.refusal(part, part)


def test_without_the_flags_they_are_refused(root: Path) -> None:
    rig = Rig(root / "llava")
    try:
        for url, flag in (
            ("https://example.com/cat.png", "--allowed-media-domains"),
            (f"file://{root}/allowed/red.png", "--allowed-local-media-path"),
        ):
            refusal = rig.refusal(by_url(url))
            assert f"or start the server with {flag}" in refusal
    finally:
        rig.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allowed_media_domains": ("https://a.example/",)}, "must be names of hosts"),
        ({"allowed_media_domains": ("",)}, "must be names of hosts"),
        ({"allowed_local_media_path": "/does/not/exist"}, "must be a folder; got /does/not/exist"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings)
