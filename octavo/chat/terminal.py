"""The dialogue in the terminal: read a line, stream the answer, Ctrl-C stops the answer only."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from octavo.chat.pictures import picture_part
from octavo.chat.printer import make_printer
from octavo.chat.terminal_input import PROMPT, READER, TerminalInput
from octavo.http_client import ServerError
from octavo.local.home import Home
from octavo.options.parser import CommandParser, positive
from octavo.options.settings import add_engine_options, engine_config
from octavo.styles import dimmed
from octavo_engine.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Sequence

    from octavo.chat.backends import ChatBackend, Message

HISTORY = "chat_history"
HELP = """/help            this list
/reset           begin a new conversation
/image FILE      send this picture with the next message
/system TEXT     set the system message; without TEXT, remove it
/exit            end the program, as Ctrl-D does"""


class Dialogue(Protocol):
    """What a line means, and what is remembered."""

    is_markdown: bool  # what is answered

    def ask(
        self, talker: ChatBackend, line: str, options: dict[str, Any]
    ) -> AsyncGenerator[str, None]: ...
    def answered(self, line: str, answer: str) -> None: ...
    def reset(self) -> None: ...
    def instruct(self, text: str) -> str:
        """Sets the system message; what is printed then."""

    def attach(self, file: str) -> str:
        """Sends a picture with the next line; what is printed then. Raises ConfigError."""


class ChatDialogue:
    """A chat: each line is sent with the conversation so far. The first takes the `images` with
    it. Raises ConfigError for those that cannot be sent."""

    is_markdown = True

    def __init__(self, system: str | None = None, images: Sequence[str] = ()) -> None:
        self._system = system or ""
        self._messages: list[Message] = []
        self._attached = [picture_part(file) for file in images]
        self._question: Message = {}

    def ask(
        self, talker: ChatBackend, line: str, options: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        opening = [{"role": "system", "content": self._system}] if self._system else []
        text = {"type": "text", "text": line}
        content = [*self._attached, text] if self._attached else line
        self._question = {"role": "user", "content": content}
        self._attached = []  # sent once: a model that refuses it takes the next line
        return talker.chat([*opening, *self._messages, self._question], options)

    def answered(self, line: str, answer: str) -> None:
        self._messages += [self._question, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        self._messages = []
        self._attached = []

    def instruct(self, text: str) -> str:
        self._system = text
        return "(system message set)" if text else "(no system message)"

    def attach(self, file: str) -> str:
        if not file:
            return "(name a picture: /image FILE)"
        self._attached.append(picture_part(file))
        count = len(self._attached)
        return f"({count} picture{'s' * (count > 1)} with the next message)"


class CompletionDialogue:
    """A text to continue; nothing is remembered."""

    is_markdown = False

    def ask(
        self, talker: ChatBackend, line: str, options: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        return talker.complete(line, options)

    def answered(self, line: str, answer: str) -> None:
        pass  # each line is independent

    def reset(self) -> None:
        pass

    def instruct(self, text: str) -> str:
        return "(a text that is continued has no system message; octavo chat has)"

    def attach(self, file: str) -> str:
        return "(a text that is continued has no pictures; octavo chat has)"


def parser(prog: str, description: str, *, is_remote: bool = True) -> CommandParser:
    """`is_remote`: a running server may answer."""
    options = CommandParser(prog, description)
    options.add_argument("-p", "--prompt", help="prompt to answer, then exit; - reads stdin")
    if is_remote:
        options.add_argument("--url", help="use a running server instead of loading a model here")
        options.add_argument("--api-key", help="for --url; or OCTAVO_API_KEY")
    options.add_argument("--max-tokens", type=positive, metavar="N", help="longest answer")
    options.add_argument(
        "--temperature", type=float, metavar="N",
        help="0: always the likeliest token; higher: more variety; default: the model's own",
    )  # fmt: skip
    options.add_argument(
        "--top-p",
        type=float,
        metavar="N",
        help="choose among the likeliest tokens that together have this probability",
    )
    add_engine_options(options)
    return options


def add_chat_options(options: CommandParser) -> None:
    """Of commands that hold a conversation."""
    options.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    options.add_argument(
        "--image", metavar="FILE", action="append", default=[],
        help="picture that goes with the first message; may be given several times",
    )  # fmt: skip


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
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    talker.counts_tokens = is_terminal
    if is_terminal:
        print(f"{talker.title}\n/help lists the commands. Ctrl-C stops an answer.\n")
    reader = TerminalInput(Home.find(os.environ).path / HISTORY if is_terminal else None)
    try:
        was_interrupted = False
        while True:
            line = await interrupts.race(reader.line())
            if line is None and reader.is_waiting and is_terminal and not was_interrupted:
                was_interrupted = True
                print(f"\n(Ctrl-C again, or /exit, ends the program)\n{PROMPT}", end="", flush=True)
                continue
            was_interrupted = False
            if line is None or line.strip() in ("/exit", "/quit"):
                return
            if (reply := command_reply(line, dialogue)) is not None:
                print(reply)
            elif line.strip():
                try:
                    await _answer(talker, dialogue, line, options, interrupts)
                except ServerError as error:
                    print(f"octavo: {error}", file=sys.stderr)
                if is_terminal:
                    print()
    finally:
        reader.close()


def command_reply(line: str, dialogue: Dialogue) -> str | None:
    """What is printed for a line that is a command; None for one that is for the model."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    match word:
        case "/help" | "/?":
            return HELP
        case "/reset":
            dialogue.reset()
            return "(forgotten)"
        case "/system":
            return dialogue.instruct(rest)
        case "/image":
            try:
                return dialogue.attach(rest)
            except ConfigError as error:
                return f"({error})"
    if re.fullmatch(r"/[a-z]+", word) and not rest:
        return f"{word} is no command; /help lists them"
    return None


async def _answer(
    talker: ChatBackend,
    dialogue: Dialogue,
    line: str,
    options: dict[str, Any],
    interrupts: Interrupts,
) -> int:
    said: list[str] = []
    first_at: list[float] = []
    printer = make_printer(sys.stdout, is_markdown=dialogue.is_markdown)

    async def stream() -> bool:
        async with aclosing(dialogue.ask(talker, line, options)) as pieces:
            async for piece in pieces:
                if piece and not first_at:
                    first_at.append(time.monotonic())
                said.append(piece)
                printer.write(piece)
        return True

    try:
        whole = await interrupts.race(stream())
    except RequestError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        return 1
    finally:
        printer.end()
    print()
    if talker.counts_tokens:
        since_s = time.monotonic() - first_at[0] if first_at else 0.0
        tokens = talker.last_tokens if whole else None
        print(dimmed(describe_speed(tokens, since_s, is_whole=bool(whole)), sys.stdout))
    dialogue.answered(line, "".join(said))
    return 0 if whole else 130


def describe_speed(tokens: int | None, since_first_s: float, *, is_whole: bool) -> str:
    """The line below an answer. The first token is not counted: it waits for the prompt."""
    if not is_whole:
        return "(stopped)"
    if tokens is None:
        return f"({since_first_s:.1f} s)"
    plural = "" if tokens == 1 else "s"
    if tokens < 2 or since_first_s <= 0:
        return f"({tokens} token{plural})"
    return f"({tokens} tokens, {(tokens - 1) / since_first_s:.1f} tokens per second)"


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
