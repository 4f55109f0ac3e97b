"""Flags of vLLM's that are called otherwise here, or are not needed: taken all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

RENAMED = {
    "--h11-max-header-count": "--max-headers",
    "--h11-max-incomplete-event-size": "--max-header-bytes",
    "--max-num-queued-reqs": "--max-queue",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--uvicorn-log-level": "--log-level",
    "-sc": "--speculative-config",
}
REPLACED = {
    "--disable-fastapi-docs": ("--no-docs",),
    "--disable-log-requests": ("--no-enable-log-requests",),
    "--disable-response-store": ("--no-response-store",),
    "--disable-uvicorn-access-log": ("--access-log", "none"),
}
IGNORED = frozenset(
    (
        "--collect-detailed-traces",  # there is one kind of trace
        "--disable-access-log-for-endpoints",  # probes are not logged anyway
    )
)
# What they turn on is always on here.
ALWAYS_SO = frozenset(
    (
        "--async-scheduling",
        "--disable-log-stats",  # nothing is logged; /metrics has them
        "--enable-chunked-prefill",
        "--enable-offline-docs",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
        "--enable-ssl-refresh",
    )
)

# What cannot be had here: the flag, and what to do instead.
REFUSED = {
    "--lora-extra-vocab-size": "adapters cannot bring tokens of their own; "
    "merge such an adapter into the model",
    "--fully-sharded-loras": "adapters are not sharded; leave it out",
}


def translate(argv: Sequence[str]) -> list[str]:
    """The same setting in our own flags. Unknown words stay for the parser to judge. Raises
    ConfigError."""
    result: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in REFUSED:
            raise ConfigError(f"{flag}: {REFUSED[flag]}")
        if flag in IGNORED:
            if not equals:
                next(words, None)  # its value
        elif flag in ALWAYS_SO:
            continue
        elif flag in REPLACED:
            result += REPLACED[flag]
        elif flag in RENAMED:
            result.append(RENAMED[flag] + equals + value)
        else:
            result.append(word)
    return result
