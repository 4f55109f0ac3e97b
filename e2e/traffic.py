"""Requests without end, by the official client: what users see while the platform changes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Self

import openai

from e2e.written import PROMPT

REQUEST_TIMEOUT_S = 60.0
# Who talks to a router that is going away connects anew, once a moment, to the Service.
RECONNECTS = 20
RECONNECT_PAUSE_S = 0.25
QUESTION = "Tell a long story about a lighthouse keeper."
TOKENS = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, by the monotonic clock."""

    began_at: float
    ended_at: float
    fault: str  # '' where the whole answer came
    is_stream: bool


class Traffic:
    """Some clients that send requests in turn, every second one for a stream.

    Nothing is repeated, but with `reconnects` what found no connection or lost it before the first
    byte of an answer: what every client does by itself.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        clients: int = 4,
        tokens: int = 24,
        reconnects: bool = False,
    ) -> None:
        self._base_url = base_url
        self._model = model
        self._tokens = tokens
        self._reconnects = RECONNECTS if reconnects else 0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def outcomes(self) -> list[Outcome]:
        with self._lock:
            return list(self._outcomes)

    def await_answers(self, count: int, timeout_s: float = 60.0) -> None:
        """Until so many requests made from now on were answered in whole. Raises AssertionError."""
        since = time.monotonic()
        deadline = since + timeout_s
        while (missing := count - self._answered(since)) > 0:
            assert time.monotonic() < deadline, f"{missing} answers are missing"
            self._stopping.wait(0.05)

    def assert_unbroken(self, at_least: int = 20) -> None:
        """All requests were answered in whole, and there were enough to say so."""
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"
        outcomes = self.outcomes
        faults = [outcome.fault for outcome in outcomes if outcome.fault]
        assert not faults, f"{len(faults)} of {len(outcomes)} requests failed: {faults[:5]}"
        assert len(outcomes) >= at_least, f"only {len(outcomes)} requests were made"

    def _answered(self, since: float) -> int:
        return sum(not outcome.fault and outcome.began_at >= since for outcome in self.outcomes)

    def _run(self, client_number: int) -> None:
        with openai.OpenAI(
            base_url=self._base_url, api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        ) as client:
            number = client_number  # so that streams and plain answers are under way together
            while not self._stopping.is_set():
                number += 1
                is_stream = number % 2 == 0
                began_at = time.monotonic()
                fault = self._fault_of(client, f"{client_number}.{number}", is_stream)
                outcome = Outcome(began_at, time.monotonic(), fault, is_stream)
                with self._lock:
                    self._outcomes.append(outcome)
                self._stopping.wait(1.0 if fault else 0.05)

    def _fault_of(self, client: openai.OpenAI, name: str, is_stream: bool) -> str:
        request: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"Count on from {name} in {PROMPT}."}],
            "max_tokens": self._tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        try:
            return self._streamed(client, request) if is_stream else self._plain(client, request)
        except openai.OpenAIError as error:
            return f"{'stream' if is_stream else 'plain'} {name}: {type(error).__name__}: {error}"
        except Exception as error:  # what the transport says of a stream that broke off
            return f"stream {name} broke: {type(error).__name__}: {error}"

    def _plain(self, client: openai.OpenAI, request: dict[str, Any]) -> str:
        answer = self._connected(client, request)
        return self._judge(answer.choices[0].finish_reason, answer.usage)

    def _streamed(self, client: openai.OpenAI, request: dict[str, Any]) -> str:
        finish, usage = None, None
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in self._connected(client, {**request, **options}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
        return self._judge(finish, usage)

    def _connected(self, client: openai.OpenAI, request: dict[str, Any]) -> Any:
        for attempt in range(self._reconnects + 1):
            try:
                return client.chat.completions.create(**request)
            except openai.APITimeoutError:
                raise
            except openai.APIConnectionError:
                if attempt == self._reconnects:
                    raise
                self._stopping.wait(RECONNECT_PAUSE_S)
        raise AssertionError("unreachable")

    def _judge(self, finish: str | None, usage: Any) -> str:
        tokens = usage.completion_tokens if usage else 0
        if (finish, tokens) == ("length", self._tokens):
            return ""
        return f"ended with {finish} after {tokens} of {self._tokens} tokens"


def stream_text(
    client: openai.OpenAI,
    model: str,
    started: threading.Event | None = None,
    parts: list[str] | None = None,
) -> str:
    """The whole text. `started` is set at its tenth part; `parts` grows with it."""
    parts = [] if parts is None else parts
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        parts.extend(choice.delta.content or "" for choice in chunk.choices)
        if started is not None and len(parts) == 10:
            started.set()
    return "".join(parts)
