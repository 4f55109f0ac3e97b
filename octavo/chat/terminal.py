"""The dialogue in the terminal: read a line, stream the answer, Ctrl-C stops the answer only."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from octavo.options.parser import CommandParser, positive
from octavo.options.settings import add_engine_options, engine_config
from octavo_engine.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator

    from octavo.chat.backends import ChatBackend, Message

PROMPT = "> "


class Dialogue(Protocol):
    """What a line means, and what is remembered."""

    def ask(
        self, talker: ChatBackend, line: str, options: dict[str, Any]
    ) -> AsyncGenerator[str, None]: ...
    def answered(self, line: str, answer: str) -> None: ...
    def reset(self) -> None: ...


class ChatDialogue:
    """A chat: each line is sent with the conversation so far."""

    def __init__(self, system: str | None = None) -> None:
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def ask(
        self, talker: ChatBackend, line: str, options: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        return talker.chat([*self._messages, {"role": "user", "content": line}], options)

    def answered(self, line: str, answer: str) -> None:
        self._messages += [
            {"role": "user", "content": line},
            {"role": "assistant", "content": answer},
        ]

    def reset(self) -> None:
        self._messages = list(self._opening)


class CompletionDialogue:
    """A text to continue; nothing is remembered."""

    def ask(
        self, talker: ChatBackend, line: str, options: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        return talker.complete(line, options)

    def answered(self, line: str, answer: str) -> None:
        pass  # each line is independent

    def reset(self) -> None:
        pass


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    options = CommandParser(prog, description)
    options.add_argument("-p", "--prompt", help="prompt to answer, then exit; - reads stdin")
    options.add_argument("--url", help="use a running server instead of loading a model here")
    options.add_argument("--api-key", help="for --url; or OCTAVO_API_KEY")
    options.add_argument("--max-tokens", type=positive, metavar="N", help="longest answer")
    options.add_argument("--temperature", type=float, metavar="N")
    options.add_argument("--top-p", type=float, metavar="N")
    add_engine_options(options)
    return options


def run(args: argparse.Namespace, dialogue: Dialogue) -> int:
    """The exit code."""
    options = {
        name: getattr(args, name)
        for name in ("max_tokens", "temperature", "top_p")
        if getattr(args, name) is not None
    }
    if hasattr(args, "seed"):  # the engine's flag; here it makes the answers repeatable
        options["seed"] = args.seed
    code = asyncio.run(_main(args, dialogue, options))
    if any(thread.name == READER for thread in threading.enumerate()):
        # Somebody left with Ctrl-C while a thread waits for a line; it cannot be woken.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


READER = "octavo-stdin"


async def _main(args: argparse.Namespace, dialogue: Dialogue, options: dict[str, Any]) -> int:
    talker = await _talker(args)
    try:
        interrupts = Interrupts()
        with interrupts:
            if args.prompt is not None:
                line = sys.stdin.read() if args.prompt == "-" else args.prompt
                if not line.strip():
                    raise ConfigError("--prompt is empty")
                return await _answer(talker, dialogue, line, options, interrupts)
            await _converse(talker, dialogue, options, interrupts)
            return 0
    finally:
        await talker.close()


async def _talker(args: argparse.Namespace) -> ChatBackend:
    from octavo.chat.backends import LocalBackend, RemoteBackend

    if args.url is not None:
        model = args.model_positional or getattr(args, "model", None)
        key = args.api_key or os.environ.get("OCTAVO_API_KEY", "").partition(",")[0]
        return await RemoteBackend.start(args.url, model, key or None)
    return await LocalBackend.start(engine_config(args))


async def _converse(
    talker: ChatBackend, dialogue: Dialogue, options: dict[str, Any], interrupts: Interrupts
) -> None:
    while True:
        line = await interrupts.race(_read_line())
        if line is None or line.strip() in ("/exit", "/quit"):
            return
        if line.strip() == "/reset":
            dialogue.reset()
            print("(forgotten)")
        elif line.strip():
            await _answer(talker, dialogue, line, options, interrupts)


async def _answer(
    talker: ChatBackend,
    dialogue: Dialogue,
    line: str,
    options: dict[str, Any],
    interrupts: Interrupts,
) -> int:
    said: list[str] = []

    async def stream() -> bool:
        async with aclosing(dialogue.ask(talker, line, options)) as pieces:
            async for piece in pieces:
                said.append(piece)
                print(piece, end="", flush=True)
        return True

    try:
        whole = await interrupts.race(stream())
    except RequestError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        return 1
    print()
    dialogue.answered(line, "".join(said))
    return 0 if whole else 130


async def _read_line() -> str | None:
    """A line from stdin, or None at its end. In its own thread: reading cannot be cancelled."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def settle(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        try:
            text: str | None = input(PROMPT if sys.stdin.isatty() else "")
        except (EOFError, UnicodeDecodeError):
            text = None
        loop.call_soon_threadsafe(settle, text)

    threading.Thread(target=read, name=READER, daemon=True).start()
    return await line


class Interrupts:
    """Ctrl-C as an event of the loop, that ends one thing and not the program."""

    def __init__(self) -> None:
        self._pressed = asyncio.Event()

    def __enter__(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._pressed.set)

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def race(self, work: Any) -> Any:
        """The result of `work`, or None if Ctrl-C came first; `work` is cancelled then."""
        self._pressed.clear()
        task = asyncio.ensure_future(work)
        pressed = asyncio.ensure_future(self._pressed.wait())
        try:
            await asyncio.wait((task, pressed), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            pressed.cancel()
            await asyncio.wait((task, pressed))
