"""The model that is served: its names, its dialect and how routers label its prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import ModelUnknown
from octavo_engine.server.adapter_resolvers import make_resolvers
from octavo_engine.server.openai.chat.dialect import Dialect, choose, known_formats
from octavo_engine.server.routers.route_labels import Labeller
from octavo_engine.server.served_adapters import ServedAdapters

if TYPE_CHECKING:
    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.server.settings import ServerSettings

_MAX_NAMED = 10  # models that a refusal lists


class ServedModel:
    """Of one server. All but the names is known once the model is loaded."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        self.names = engine.config.names
        resolvers = make_resolvers(settings, takes_adapters=engine.config.enable_lora)
        self.adapters = ServedAdapters(engine, self.names, resolvers)
        self._engine = engine
        self._settings = settings
        self._labeller: Labeller | None = None
        self._formats = known_formats(settings)
        self._dialect: Dialect | None = None

    @property
    def labeller(self) -> Labeller:
        """Made when the first request needs it: the tokenizer must be there."""
        if self._labeller is None:
            engine = self._engine
            self._labeller = Labeller(engine.tokenizer, engine.info.vocab_size, engine.residency)
        return self._labeller

    @property
    def dialect(self) -> Dialect:
        """How the model writes tool calls and reasoning."""
        if self._dialect is None:
            self._dialect = choose(self._settings, self._engine.tokenizer, self._formats)
        return self._dialect

    async def find(self, name: str | None) -> str:
        """As `check_name`, for requests that may bring an adapter into memory."""
        if name is not None and name not in self.names and name not in self.adapters:
            await self.adapters.resolve(name)
        return self.check_name(name)

    def check_name(self, name: str | None) -> str:
        """The name to answer under. Raises ModelUnknown (404)."""
        if name is None:
            return self.names[0]
        if name in self.names or name in self.adapters:
            return name
        there = [*self.names, *self.adapters.names]
        listed = ", ".join(f"`{known}`" for known in there[:_MAX_NAMED])
        rest = f" and {len(there) - _MAX_NAMED} more." if there[_MAX_NAMED:] else "."
        raise ModelUnknown(
            f"The model `{name[:200]}` does not exist. There are: {listed}{rest}", param="model"
        )
