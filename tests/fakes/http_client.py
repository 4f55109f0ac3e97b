"""A client that sends raw bytes and reads answers strictly: what is not HTTP fails the test."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of the error object."""
        code: str = self.json["error"]["code"]
        return code


class RawClient:
    """One connection. Use as `async with await RawClient.open(port)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, *, receive_buffer: int = 0) -> Self:
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except OSError:
            sock.close()
            raise
        limit = 2048 if receive_buffer else 2**24
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        return cls(reader, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, body: Any, path: str = "/v1/chat/completions", more: str = "") -> None:
        await self.send(post_bytes(body, path, more))

    async def ask(self, body: Any, path: str = "/v1/chat/completions", more: str = "") -> Answer:
        await self.post(body, path, more)
        return await self.answer()

    async def get(self, path: str, method: str = "GET", more: str = "") -> Answer:
        await self.send(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n".encode())
        return await self.answer(is_head=method == "HEAD")

    async def head(self) -> Answer:
        """The next answer's head; skips interim ones."""
        while True:
            data = await self.reader.readuntil(b"\r\n\r\n")
            line, *lines = data[:-4].decode("latin-1").split("\r\n")
            version, status, _ = line.split(" ", 2)
            assert version == "HTTP/1.1", line
            if int(status) >= 200:
                break
        pairs = [part.partition(":") for part in lines]
        return Answer(int(status), [(name.lower(), value.strip()) for name, _, value in pairs])

    async def chunk(self) -> bytes:
        """The next chunk; b"" is the last one."""
        size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
        data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def answer(self, *, is_head: bool = False) -> Answer:
        answer = await self.head()
        lengths = [value for name, value in answer.headers if name == "content-length"]
        encodings = [value for name, value in answer.headers if name == "transfer-encoding"]
        assert len(lengths) + len(encodings) <= 1, answer.headers
        if is_head or answer.status in (204, 304):
            return answer
        if lengths:
            answer.body = await self.reader.readexactly(int(lengths[0]))
        elif encodings:
            assert encodings == ["chunked"]
            pieces = []
            while piece := await self.chunk():
                pieces.append(piece)
            answer.body = b"".join(pieces)
        else:
            answer.body = await self.reader.read()
        return answer

    async def ended(self) -> bytes:
        """What still comes until the router closes; a reset counts as that."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    def half_close(self) -> None:
        self.writer.write_eof()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        if sock is not None:  # unless the router has closed first
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def post_bytes(body: Any, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
