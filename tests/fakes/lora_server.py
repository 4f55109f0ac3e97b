"""A server of plain models that loads and unloads adapters over vLLM's endpoints."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.fakes.upstream import CHAT, Peer, Received, event

if TYPE_CHECKING:
    from collections.abc import Mapping

BASE = "base"


@dataclass
class LoraServer:
    """A `ScriptedUpstream`'s script. It answers with the name of the model that it used."""

    loaded: dict[str, str] = field(default_factory=dict)  # name → path
    broken: Mapping[str, str] = field(default_factory=dict)  # paths that cannot be loaded, and why
    load_s: float = 0.0
    log: list[str] = field(default_factory=list)  # of loads and unloads
    num_answers: int = 0

    async def __call__(self, peer: Peer, request: Received) -> None:
        path = request.line.split(b" ")[1].decode()
        match path:
            case "/v1/models":
                await self._say(peer, 200, self._models())
            case "/v1/load_lora_adapter":
                await self._load(peer, request.json)
            case "/v1/unload_lora_adapter":
                name = request.json["lora_name"]
                self.log.append(f"unload {name}")
                known = self.loaded.pop(name, None) is not None
                await self._say(peer, 200 if known else 404, _error(f"{name} is not loaded"))
            case "/v1/chat/completions":
                await self._chat(peer, request.json)
            case _:
                await self._say(peer, 404, {})

    def _models(self) -> dict[str, Any]:
        adapters = [{"id": name, "parent": BASE} for name in self.loaded]
        return {"object": "list", "data": [{"id": BASE, "parent": None}, *adapters]}

    async def _load(self, peer: Peer, body: dict[str, Any]) -> None:
        name, path = body["lora_name"], body["lora_path"]
        self.log.append(f"load {name}")
        await asyncio.sleep(self.load_s)
        if path in self.broken:
            await self._say(peer, 400, _error(self.broken[path]))
        elif name in self.loaded and not body.get("load_inplace"):
            await self._say(peer, 400, _error(f"The lora adapter '{name}' has already been loaded"))
        else:
            self.loaded[name] = path
            await self._say(peer, 200, f"Success: LoRA adapter '{name}' added successfully.")

    async def _chat(self, peer: Peer, body: dict[str, Any]) -> None:
        name = body["model"]
        if name != BASE and name not in self.loaded:
            await self._say(peer, 404, _error(f"The model `{name}` does not exist."))
            return
        self.num_answers += 1
        if body.get("stream"):
            await peer.begin_stream()
            await peer.chunk(event(name))
            await peer.chunk(b"data: [DONE]\n\n")
            await peer.end_stream()
            return
        await self._say(peer, 200, {**CHAT, "model": name})

    async def _say(self, peer: Peer, status: int, body: object) -> None:
        words = {200: "OK", 400: "Bad Request", 404: "Not Found"}
        await peer.answer(json.dumps(body).encode(), status=f"{status} {words[status]}")


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "code": 400}}
