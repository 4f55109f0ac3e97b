"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import msgspec

from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service  # noqa: TC001

_TEXT = (b"content-type", b"text/plain; charset=utf-8")


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """The folder of a PEFT adapter, as the engine sees it."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replace the adapter of that name
    pinned: bool = False  # keep it in memory, however many others are loaded


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's; of no effect


async def load_adapter(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(LoadAdapterRequest)
    _check_allowed(service)
    await service.model.adapters.load(
        request.lora_name, request.lora_path,
        in_place=request.load_inplace, is_pinned=request.pinned,
    )  # fmt: skip
    text = f"Success: LoRA adapter '{request.lora_name}' added successfully."
    await exchange.reply(text.encode(), headers=[_TEXT])


async def unload_adapter(exchange: Exchange, service: Service) -> None:
    """Requests that were taken with it are answered with it."""
    request = await exchange.json(UnloadAdapterRequest)
    _check_allowed(service)
    await service.model.adapters.unload(request.lora_name)
    text = f"Success: LoRA adapter '{request.lora_name}' removed successfully."
    await exchange.reply(text.encode(), headers=[_TEXT])


def _check_allowed(service: Service) -> None:
    if not service.settings.allow_runtime_lora_updating:
        raise HttpError(
            403,
            "Adapters cannot be loaded or unloaded while this server runs. Start it with "
            "--allow-runtime-lora-updating, or name them in --lora-modules.",
            code="adapters_fixed",
        )
