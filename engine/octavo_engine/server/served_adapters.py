"""The LoRA adapters that are served under names of their own."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import (
    ConfigError,
    GenerationFailed,
    InvalidRequest,
    ModelUnknown,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.server.adapter_resolvers import AdapterResolver
    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.state.adapter import AdapterRef

logger = logging.getLogger("octavo.server")

MAX_NAME_CHARS = 256


class AdapterModule(NamedTuple):
    """One of --lora-modules."""

    name: str
    path: str


def parse_modules(texts: Sequence[str], model_names: Sequence[str]) -> list[AdapterModule]:
    """Of name=path, or of JSON with vLLM's fields. Raises ConfigError."""
    modules = [_parse_module(text, model_names) for text in texts]
    seen: set[str] = set()
    for module in modules:
        if module.name in seen or module.name in model_names:
            raise ConfigError(f"--lora-modules: the name {module.name} is given twice")
        seen.add(module.name)
    return modules


def _parse_module(text: str, model_names: Sequence[str]) -> AdapterModule:
    flag = "--lora-modules"
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        if not name or not equals or not path:
            raise ConfigError(f"{flag} takes NAME=PATH or JSON; got {text:.80}")
        return AdapterModule(name, path)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} is not valid JSON: {error}") from None
    unknown = set(fields) - {"name", "path", "base_model_name"}
    if unknown:
        raise ConfigError(
            f"{flag} has an unknown field {sorted(unknown)[0]:.40}; known: name, path, "
            "base_model_name"
        )
    for field in ("name", "path"):
        if not isinstance(fields.get(field), str) or not fields[field]:
            raise ConfigError(f"{flag}: {field} must be a text; got {fields.get(field)!r:.40}")
    base = fields.get("base_model_name")
    if base is not None and base not in model_names:
        raise ConfigError(f"{flag}: base_model_name is {base!r:.80}, which is not served here")
    return AdapterModule(fields["name"], fields["path"])


class ServedAdapters:
    """Names and what they stand for; the engine core knows contents only.

    An adapter that is unloaded or replaced stays with the requests that were taken with it. A name
    that nobody loaded may be found by a resolver.
    """

    def __init__(
        self,
        engine: ServedEngine,
        model_names: Sequence[str],
        resolvers: Sequence[AdapterResolver] = (),
    ) -> None:
        self._engine = engine
        self._model_names = model_names
        self._resolvers = resolvers
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._refs: dict[str, AdapterRef] = {}
        self._changing = asyncio.Lock()  # one change at a time: names are checked before and after
        self.on_changed: Callable[[], None] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._refs

    @property
    def names(self) -> list[str]:
        return list(self._refs)

    @property
    def digests(self) -> dict[str, str]:
        """The content that each name stands for now."""
        return {name: ref.digest for name, ref in self._refs.items()}

    def get(self, name: str) -> AdapterRef | None:
        return self._refs.get(name)

    async def resolve(self, name: str) -> None:
        """Load the adapter that a resolver finds under the name, if one does. Raises RequestError.

        Requests for one name wait for the same search, which goes on when their clients leave.
        """
        if not self._resolvers or len(name) > MAX_NAME_CHARS:
            return
        task = self._resolving.get(name)
        if task is None:
            task = self._resolving[name] = asyncio.create_task(self._resolve(name))
            task.add_done_callback(lambda _: self._resolving.pop(name, None))
        await asyncio.shield(task)

    async def _resolve(self, name: str) -> None:
        for resolver in self._resolvers:
            try:
                path = await asyncio.to_thread(resolver, name)
            except Exception as error:  # a package's own code: anything may happen
                logger.exception("An adapter's resolver failed", extra={"adapter": name})
                raise GenerationFailed(
                    f"The adapter {name} could not be looked for: its resolver failed"
                ) from error
            if path is not None and name not in self._refs:
                await self.load(name, path)
            if name in self._refs:
                return

    async def load(
        self, name: str, path: str, *, in_place: bool = False, is_pinned: bool = False
    ) -> AdapterRef:
        """Serve the adapter at `path` under `name`. Raises RequestError; then all is as before."""
        self._check_enabled()
        if not name or len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(
                f"lora_name must have 1 to {MAX_NAME_CHARS} characters", param="lora_name"
            )
        if not path:
            raise InvalidRequest("lora_path must not be empty", param="lora_path")
        async with self._changing:
            if name in self._model_names:
                raise InvalidRequest(
                    f"lora_name {name} is the name of the model itself", param="lora_name"
                )
            before = self._refs.get(name)
            if before is not None and not in_place:
                raise InvalidRequest(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    param="lora_name",
                )
            ref = await self._engine.load_adapter(name, path, is_pinned=is_pinned)
            self._refs[name] = ref
            if before is not None and before.digest != ref.digest:
                await self._forget(before)
        logger.info("Loaded an adapter", extra={"adapter": name, "digest": ref.digest})
        self._changed()
        return ref

    async def unload(self, name: str) -> None:
        """Answer to the name no longer. Raises RequestError."""
        self._check_enabled()
        async with self._changing:
            ref = self._refs.pop(name, None)
            if ref is None:
                raise ModelUnknown(
                    f"The lora adapter '{name[:MAX_NAME_CHARS]}' cannot be found.",
                    param="lora_name",
                    code="adapter_not_found",
                )
            await self._forget(ref)
        logger.info("Unloaded an adapter", extra={"adapter": name})
        self._changed()

    async def load_modules(self, modules: Sequence[AdapterModule]) -> None:
        """At the start. Raises ConfigError."""
        for name, path in modules:
            try:
                await self.load(name, path)
            except RequestError as error:
                raise ConfigError(f"--lora-modules {name}={path}: {error.message}") from error

    def _check_enabled(self) -> None:
        if not self._engine.config.enable_lora:
            raise InvalidRequest(
                "This server takes no LoRA adapters; start it with --enable-lora",
                param="lora_name",
            )

    async def _forget(self, ref: AdapterRef) -> None:
        """Unless another name stands for the same content."""
        if all(other.digest != ref.digest for other in self._refs.values()):
            await self._engine.unload_adapter(ref.digest)

    def _changed(self) -> None:
        if self.on_changed is not None:
            self.on_changed()
