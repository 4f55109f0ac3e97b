"""Who answers in the terminal: an engine of our own, or any server with the OpenAI API."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from octavo.http_client import DONE, HttpConnection, ServerAddress, ServerError, get_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.async_engine import AsyncEngine
    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.core.media.workers import PictureWorkers

Message = dict[str, Any]  # role and content, a text or parts


class ChatBackend(Protocol):
    """Streams answers; closing an answer's iterator stops its generation."""

    counts_tokens: bool  # set to have `last_tokens` after each answer

    @property
    def title(self) -> str:
        """Which model answers, and where."""

    @property
    def last_tokens(self) -> int | None:
        """Of the last answer, where it is known."""

    def chat(
        self, messages: list[Message], options: dict[str, Any]
    ) -> AsyncGenerator[str, None]: ...
    def complete(self, prompt: str, options: dict[str, Any]) -> AsyncGenerator[str, None]: ...
    async def close(self) -> None: ...


class LocalBackend:
    """An engine of our own."""

    counts_tokens = False

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.last_tokens: int | None = None

    @property
    def title(self) -> str:
        info = self._engine.info
        return f"{info.names[0]}, in this process on {info.backend}"

    @classmethod
    async def start(cls, config: EngineConfig) -> LocalBackend:
        """Loads the model. Raises ConfigError, ModelError."""
        from octavo_engine.core.async_engine import AsyncEngine

        engine = await AsyncEngine.start(config)
        try:
            await _show_loading(engine)
        except BaseException:
            await engine.stop()
            raise
        return cls(engine)

    async def chat(
        self, messages: list[Message], options: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        from octavo_engine.core.media.messages import take_pictures
        from octavo_engine.errors import ModelError, RequestError

        if self._engine.tokenizer.chat_template is None:
            raise ModelError("this model has no chat template; use octavo complete")
        workers = self._engine.pictures
        marked, files = take_pictures(messages, "image" if workers is None else workers.kind)
        if files and workers is None:
            raise RequestError("this model takes no pictures", code="not_supported")
        ids = self._engine.tokenizer.encode_chat(marked)
        media: PromptMedia | None = None
        if workers is not None and files:
            ids, media = await _with_pictures(workers, ids, files)
        async with aclosing(self._generate(ids, options, media)) as pieces:
            async for piece in pieces:
                yield piece

    async def complete(self, prompt: str, options: dict[str, Any]) -> AsyncGenerator[str, None]:
        ids = self._engine.tokenizer.encode(prompt)
        async with aclosing(self._generate(ids, options)) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        await self._engine.stop()

    async def _generate(
        self, ids: list[int], options: dict[str, Any], media: PromptMedia | None = None
    ) -> AsyncGenerator[str, None]:
        from octavo_engine.core.text.submission import Submission
        from octavo_engine.state.sampling_params import SamplingParams

        defaults = dict(self._engine.info.default_params)
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        params = SamplingParams(**{"max_tokens": None, **defaults, **options})
        submission = Submission(
            request_id=secrets.token_hex(8), prompt=ids, params=params, media=media
        )
        num_tokens = 0
        async with aclosing(self._engine.iterate(submission)) as outputs:
            async for output in outputs:
                for answer in output.outputs:
                    num_tokens += len(answer.token_ids)
                    yield answer.text
        self.last_tokens = num_tokens


class RemoteBackend:
    """Another server's model, through HTTP."""

    counts_tokens = False

    def __init__(
        self, url: str, address: ServerAddress, model: str, headers: dict[str, str]
    ) -> None:
        self.title = f"{model} at {url}"
        self.last_tokens: int | None = None
        self._address = address
        self._model = model
        self._headers = headers

    @classmethod
    async def start(cls, url: str, model: str | None, api_key: str | None) -> RemoteBackend:
        """Asks for the model's name where none is given. Raises ServerError."""
        address = ServerAddress.parse(url)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if model is None:
            try:
                model = (await get_json(address, "/v1/models", headers))["data"][0]["id"]
            except (ValueError, KeyError, IndexError, TypeError):
                raise ServerError(f"{url} does not list its models; name one") from None
        return cls(url, address, str(model), headers)

    async def chat(
        self, messages: list[Message], options: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        body = {"messages": messages, **options}
        async with aclosing(self._stream("/v1/chat/completions", body)) as events:
            async for choice in events:
                yield (choice.get("delta") or {}).get("content") or ""

    async def complete(self, prompt: str, options: dict[str, Any]) -> AsyncGenerator[str, None]:
        body = {"prompt": prompt, **options}
        async with aclosing(self._stream("/v1/completions", body)) as events:
            async for choice in events:
                yield choice.get("text") or ""

    async def close(self) -> None:
        """Nothing is kept between answers."""

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        connection = await HttpConnection.connect(self._address)
        events: asyncio.Queue[bytes] = asyncio.Queue()
        if self.counts_tokens:
            body = {"stream_options": {"include_usage": True}, **body}
        payload = json.dumps({"model": self._model, "stream": True, **body}).encode()
        self.last_tokens = None
        request = asyncio.create_task(
            connection.request(
                "POST", path, payload, headers=self._headers,
                on_event=lambda data, at: events.put_nowait(data),
            )
        )  # fmt: skip
        request.add_done_callback(lambda _: events.put_nowait(DONE))
        try:
            while (data := await events.get()) != DONE:
                choices, num_tokens = _read_event(data)
                self.last_tokens = num_tokens if num_tokens is not None else self.last_tokens
                for choice in choices:
                    yield choice
            reply = await request
            if reply.status != 200 or not reply.is_stream:
                raise ServerError(reply.error)
        finally:
            request.cancel()
            connection.close()
            await asyncio.wait((request,))


async def _with_pictures(
    workers: PictureWorkers, ids: list[int], files: list[bytes]
) -> tuple[list[int], PromptMedia]:
    """Raises RequestError."""
    from octavo_engine.core.media.prompt import expand
    from octavo_engine.errors import InvalidRequest

    if workers.max_images is not None and len(files) > workers.max_images:
        raise InvalidRequest(
            f"The conversation holds {len(files)} pictures; --limit-mm-per-prompt allows "
            f"{workers.max_images}: start a new one with /reset",
            param="messages",
        )
    pictures = [await workers.prepare(file, "the picture") for file in files]
    return expand(ids, pictures, workers.tokens)


def _read_event(data: bytes) -> tuple[list[dict[str, Any]], int | None]:
    """Choices, and the tokens of the answer where they are in it. Raises ServerError for the event
    of an error, and for what is none of ours."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"]["message"]))
        count = (event.get("usage") or {}).get("completion_tokens")
        choices = [choice for choice in event["choices"] if isinstance(choice, dict)]
        return choices, count if isinstance(count, int) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ServerError(
            f"the server's stream is none of the OpenAI API: {data[:80].decode(errors='replace')!r}"
        ) from None


async def _show_loading(engine: AsyncEngine) -> None:
    """Waits until the model is there; the terminal shows how far it is."""
    ready = asyncio.create_task(engine.ready())
    shown = False
    while True:
        await asyncio.wait((ready,), timeout=0.2)
        if ready.done():
            break
        if sys.stderr.isatty():
            shown = True
            percent = f"{engine.health().progress:4.0%}"
            print(f"\rloading {engine.config.model} {percent}", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    ready.result()
