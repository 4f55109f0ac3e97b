"""Looks up names: addresses through the system, SRV records by asking its name servers."""

from __future__ import annotations

import asyncio
import secrets
import socket
from pathlib import Path

from octavo_router.discovery.dns_wire import (
    AAAA,
    SRV,
    A,
    DnsError,
    SrvRecord,
    Truncated,
    decode_answer,
    encode_query,
)
from octavo_router.errors import Unreachable

DNS_PORT = 53


class SystemResolver:
    """No caching of its own: the caller keeps the last answer."""

    def __init__(
        self, *, timeout_s: float = 3.0, resolv_conf: Path = Path("/etc/resolv.conf")
    ) -> None:
        self._timeout_s = timeout_s
        self._resolv_conf = resolv_conf

    async def addresses(self, host: str) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise Unreachable(f"no answer about {host} within {self._timeout_s:g} s") from None
        except OSError as error:
            raise Unreachable(f"{host}: {error.strerror or error}") from error
        # IPv4 first: "localhost" is both, and most servers listen on the one only.
        order = (socket.AF_INET, socket.AF_INET6)
        rows = sorted((order.index(row[0]), i) for i, row in enumerate(found) if row[0] in order)
        addresses = dict.fromkeys(str(found[i][4][0]) for _, i in rows)
        if not addresses:
            raise Unreachable(f"{host} has no address")
        return list(addresses)

    async def services(self, name: str) -> list[tuple[str, int]]:
        records = await self._ask(name, SRV)
        glue: dict[str, list[str]] = {}
        for record in records:
            if record.kind in (A, AAAA):
                glue.setdefault(record.name, []).append(record.target)
        services = [record for record in records if record.kind == SRV and record.target]
        if not services:
            raise Unreachable(f"{name} has no SRV records")
        first = min(record.priority for record in services)
        found: list[tuple[str, int]] = []
        for record in services:
            if record.priority == first:  # others are for when these are all gone
                known = glue.get(record.target) or await self.addresses(record.target)
                found += [(address, record.port) for address in known[:1]]
        return found

    async def _ask(self, name: str, kind: int) -> list[SrvRecord]:
        reason = "no name server is configured"
        for server in _name_servers(self._resolv_conf):
            try:
                return await self._ask_one(server, name, kind)
            except (TimeoutError, OSError, DnsError) as error:
                reason = str(error) or f"{server[0]} does not answer"
        raise Unreachable(f"{name}: {reason}")

    async def _ask_one(self, server: tuple[str, int], name: str, kind: int) -> list[SrvRecord]:
        loop = asyncio.get_running_loop()
        id_ = secrets.randbelow(2**16)
        query = encode_query(id_, name, kind)
        answer: asyncio.Future[bytes] = loop.create_future()
        # Connected: datagrams of others do not reach it.
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _Datagram(answer), remote_addr=server
        )
        try:
            transport.sendto(query)
            async with asyncio.timeout(self._timeout_s):
                return decode_answer(id_, await answer)
        except Truncated:
            return decode_answer(id_, await self._ask_by_tcp(server, query))
        finally:
            transport.close()

    async def _ask_by_tcp(self, server: tuple[str, int], query: bytes) -> bytes:
        async with asyncio.timeout(self._timeout_s):
            reader, writer = await asyncio.open_connection(*server)
            try:
                writer.write(len(query).to_bytes(2, "big") + query)
                length = int.from_bytes(await reader.readexactly(2), "big")
                return await reader.readexactly(length)
            except asyncio.IncompleteReadError as error:
                raise DnsError("the answer is cut short") from error
            finally:
                writer.close()


class _Datagram(asyncio.DatagramProtocol):
    def __init__(self, answer: asyncio.Future[bytes]) -> None:
        self._answer = answer

    def datagram_received(self, data: bytes, addr: object) -> None:
        if not self._answer.done():
            self._answer.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)


def _name_servers(resolv_conf: Path) -> list[tuple[str, int]]:
    """`nameserver ADDRESS` lines; read each time, since containers rewrite the file."""
    try:
        lines = resolv_conf.read_text().splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    return [_server(w[1]) for w in words if len(w) > 1 and w[0] == "nameserver"]


def _server(text: str) -> tuple[str, int]:
    """An address, or ADDRESS#PORT as some resolvers write it."""
    host, _, port = text.partition("#")
    return host, int(port) if port.isdigit() else DNS_PORT
