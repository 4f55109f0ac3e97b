"""What a server counted while a load ran: processor time, and drafts that were right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from octavo.http_client import HttpConnection, ServerError
from octavo_engine.protocol import metric_names as names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.http_client import ServerAddress

_COUNTERS: Final = (
    names.CPU_SECONDS,
    names.SPEC_DECODE_NUM_DRAFTS,
    names.SPEC_DECODE_NUM_DRAFT_TOKENS,
    names.SPEC_DECODE_NUM_ACCEPTED_TOKENS,
)


async def read_counters(
    address: ServerAddress, headers: Mapping[str, str] | None = None
) -> dict[str, float]:
    """By our names, also where a server has only vLLM's; empty for a server that has neither."""
    try:
        connection = await HttpConnection.connect(address)
        try:
            reply = await connection.request("GET", "/metrics", headers=headers)
        finally:
            connection.close()
    except ServerError:
        return {}
    return parse_counters(b"".join(reply.body).decode(errors="replace"))


def parse_counters(text: str) -> dict[str, float]:
    """Each counter that `figures` needs, over all its labels; empty for what is not readable."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except ValueError:
        return {}
    found: dict[str, float] = {}
    for name in _COUNTERS:
        for known in (f"{name}_total", f"{names.vllm_name(name)}_total"):
            if known in sums:
                found.setdefault(name, sums[known])
    return found


def figures(
    before: Mapping[str, float], after: Mapping[str, float], num_tokens: int
) -> dict[str, float]:
    """Of the time between; `num_tokens` are those of prompts and outputs."""
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    found = {}
    if (cpu_s := grown.get(names.CPU_SECONDS, 0.0)) > 0 and num_tokens:
        found["cpu_s_per_1000_tokens"] = cpu_s / num_tokens * 1e3
    drafts = grown.get(names.SPEC_DECODE_NUM_DRAFTS, 0.0)
    draft_tokens = grown.get(names.SPEC_DECODE_NUM_DRAFT_TOKENS, 0.0)
    if drafts > 0 and draft_tokens > 0:
        accepted = grown.get(names.SPEC_DECODE_NUM_ACCEPTED_TOKENS, 0.0)
        found["draft_acceptance_rate"] = accepted / draft_tokens
        found["mean_acceptance_length"] = 1 + accepted / drafts
    return found
