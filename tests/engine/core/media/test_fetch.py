"""Pictures over https from a real server: what is fetched, and each reason why not."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from octavo_common.tls import client_context
from octavo_engine.core.media.budget import ByteBudget
from octavo_engine.core.media.fetch import MAX_REDIRECTS, PictureFetcher
from octavo_engine.errors import InvalidRequest
from tests.fakes.certificates import make_authority
from tests.fakes.picture_host import PictureHost, redirect, response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

PICTURE = b"\x89PNG" * 20_000
HOSTS = ("localhost", "127.0.0.1", "127.0.0.2")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority") / "ca"
    make_authority(folder)
    return folder


class Scene:
    """A host, and a fetcher that may connect to 127.0.0.1."""

    def __init__(self, host: PictureHost, authority: Path, **options: Any) -> None:
        self.host = host
        self._options = {
            "_is_allowed": "127.0.0.1".__eq__,
            "_context": client_context(str(authority / "ca.pem")),
            **options,
        }

    async def fetch(
        self, url: str, *, hosts: tuple[str, ...] = HOSTS, most: int = 1 << 20
    ) -> bytes:
        return await PictureFetcher(hosts, **self._options).fetch(url, "field", ByteBudget(most))

    async def refusal(self, url: str, **options: Any) -> str:
        with pytest.raises(InvalidRequest) as caught:
            await self.fetch(url, **options)
        error = caught.value
        assert (error.status, error.param) == (400, "field")
        return error.message


@pytest.fixture
def play(authority: Path) -> Callable[..., None]:
    """Runs an act with a scene; options are the fetcher's."""

    def run(act: Callable[[Scene], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async with PictureHost().serving(authority) as host:
                await act(Scene(host, authority, **options))

        asyncio.run(main())

    return run


def test_a_picture_is_fetched_without_anything_of_the_server_s(play: Any) -> None:
    async def act(scene: Scene) -> None:
        scene.host.responses["/a%20b.png?size=1"] = response(PICTURE)
        url = scene.host.url("/a%20b.png?size=1")
        assert await scene.fetch(url) == PICTURE
        (head,) = scene.host.requests
        assert head.startswith(b"GET /a%20b.png?size=1 HTTP/1.1\r\nHost: localhost:")
        names = {line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:-2]}
        assert names == {b"host", b"user-agent", b"accept", b"accept-encoding", b"connection"}
        assert await scene.fetch(url, hosts=("*",)) == PICTURE
        assert await scene.fetch(url.upper().replace("A%20B.PNG?SIZE", "a%20b.png?size")) == PICTURE

    play(act)


def test_bodies_in_chunks_until_the_end_and_after_hints_are_read(play: Any) -> None:
    async def act(scene: Scene) -> None:
        chunked = b"".join(b"5\r\nabcde\r\n" for _ in range(3)) + b"0\r\n\r\n"
        scene.host.responses["/chunked"] = response(
            chunked, headers=("transfer-encoding: chunked",)
        )
        whole = response(b"abc")
        scene.host.responses["/end"] = whole.replace(b"content-length: 3\r\n", b"")
        scene.host.responses["/hints"] = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + whole
        for path, body in (("/chunked", b"abcde" * 3), ("/end", b"abc"), ("/hints", b"abc")):
            assert await scene.fetch(scene.host.url(path)) == body

    play(act)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (response(b"", status=404), "its host answers 404"),
        (response(b"", status=204), "its host answers 204"),
        (response(b"<html>", kind="text/html; charset=utf-8"), "sends 'text/html'; it must be"),
        (response(b"a", kind=""), "sends 'no content type'"),
        (response(b"a", headers=("content-encoding: gzip",)), "compresses the response"),
        (response(b"ab", headers=("content-length: 9",)), "ended in the middle of the picture"),
        (response(b"9\r\nab", headers=("transfer-encoding: chunked",)), "ended in the middle"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "the response is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nconte", "ended before the headers were complete"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 40_000, "the headers have more than 65536"),
        (b"HTTP/1.1 101 Up\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "not HTTP"),
        (redirect(""), "redirects to nowhere"),
        (redirect("https://[::"), "redirects to nowhere"),
        (redirect("http://localhost/a"), "leads to 'http'; only https is followed"),
        (redirect("file:///etc/passwd"), "leads to 'file'"),
        (redirect("https://elsewhere.example/a"), "elsewhere.example is not among --allowed-media"),
        (redirect("https://user:word@localhost/a"), "without spaces and passwords"),
        (redirect("https://127.0.0.2/a"), "127.0.0.2 is not at a public address"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_with_the_reason(play: Any, raw: bytes, why: str) -> None:
    async def act(scene: Scene) -> None:
        scene.host.responses["/a"] = raw
        message = await scene.refusal(scene.host.url("/a"))
        assert why in message and message.startswith("field")
        if "must look like" not in message:
            assert "send the file itself, as a data: URL" in message
        assert scene.host.num_connections == 1

    play(act)


def test_sizes_are_bounded_before_and_while_a_body_comes(play: Any) -> None:
    async def act(scene: Scene) -> None:
        scene.host.responses["/said"] = response(b"a", headers=("content-length: 99999999",))
        scene.host.responses["/unsaid"] = response(PICTURE).replace(b"content-length", b"x-length")
        for path in ("/said", "/unsaid"):
            message = await scene.refusal(scene.host.url(path), most=len(PICTURE) - 1)
            assert f"more than {len(PICTURE) - 1} bytes; send fewer or smaller" in message
        assert await scene.fetch(scene.host.url("/unsaid"), most=len(PICTURE)) == PICTURE

    play(act)


def test_a_host_that_is_slow_is_left(play: Any) -> None:
    async def act(scene: Scene) -> None:
        assert "it takes longer than 0.3 s" in await scene.refusal(scene.host.url("/never"))

    play(act, _timeout_s=0.3)


def test_redirects_are_followed_within_a_number(play: Any) -> None:
    async def act(scene: Scene) -> None:
        scene.host.responses["/0"] = response(PICTURE)
        for step, status in enumerate((301, 302, 303, 307, 308), 1):
            scene.host.responses[f"/{step}"] = redirect(f"/{step - 1}", status)
        assert await scene.fetch(scene.host.url(f"/{MAX_REDIRECTS}")) == PICTURE
        message = await scene.refusal(scene.host.url(f"/{MAX_REDIRECTS + 1}"))
        assert f"redirects more than {MAX_REDIRECTS} times" in message
        scene.host.responses["/to"] = redirect(scene.host.url("/0", "127.0.0.1"))
        assert await scene.fetch(scene.host.url("/to")) == PICTURE

    play(act)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://other.example/a", "other.example is not among --allowed-media-domains"),
        ("https://a.localhost/a", "a.localhost is not among"),
        ("https://localhost@evil.example/", "without spaces and passwords"),
        ("https://localhost\\@evil.example/", "without spaces and passwords"),
        ("https://local host/", "without spaces"),
        ("https://localhost/a\r\nx: y", "without spaces"),
        ("https://localhost:99999/", "must look like https://host/picture.png"),
        ("https:///a", "must look like"),
        ("https://[::/", "must look like"),
        ("https://localhost/\ud800", "must look like"),
        ("https://" + "a" * 64 + ".example/", "must look like"),
    ],
)
def test_urls_that_lead_elsewhere_are_not_connected_to(play: Any, url: str, why: str) -> None:
    async def act(scene: Scene) -> None:
        assert why in await scene.refusal(url)

    play(act)


def test_nothing_but_public_addresses_is_connected_to(play: Any, authority: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.host.responses["/"] = response(PICTURE)
        port = scene.host.port
        plain = PictureFetcher(("*",), _context=client_context(str(authority / "ca.pem")))
        names = ("localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]",
                 "0", "169.254.169.254", "[fe80::1]", "10.0.0.1")  # fmt: skip
        for name in names:
            with pytest.raises(InvalidRequest, match=r"not at a public address|has no address"):
                await plain.fetch(f"https://{name}:{port}/", "field", ByteBudget(1 << 20))
        assert scene.host.num_connections == 0
        assert await scene.fetch(scene.host.url("/")) == PICTURE  # the host does answer

    play(act)


def test_a_name_is_resolved_once_and_every_address_of_it_is_checked(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    resolved: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        resolved.append(host)
        addresses = answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    async def act(scene: Scene) -> None:
        scene.host.responses["/"] = response(PICTURE)
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        assert await scene.fetch(scene.host.url("/")) == PICTURE
        assert resolved == ["localhost"]  # what a second look would find is never seen
        answers[:] = [["127.0.0.1", "10.0.0.1"]]
        assert "not at a public address" in await scene.refusal(scene.host.url("/"))
        answers[:] = [["127.0.0.1"], ["10.0.0.1"]]
        scene.host.responses["/to"] = redirect("/")
        assert "not at a public address" in await scene.refusal(scene.host.url("/to"))
        assert scene.host.num_connections == 2

    play(act)


def test_a_host_is_known_by_its_certificate(authority: Path) -> None:
    async def main() -> None:
        async with PictureHost().serving(authority) as host:
            scene = Scene(host, authority, _context=client_context())
            message = await scene.refusal(host.url("/"))
            assert "no certificate that this server trusts" in message
            url = host.url("/")
        assert "its host does not answer" in await Scene(host, authority).refusal(url)

    asyncio.run(main())
