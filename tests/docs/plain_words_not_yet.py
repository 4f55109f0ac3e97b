"""Texts that still contain private words: `python -m tests.docs.plain_words`."""

from __future__ import annotations

# fmt: off
NOT_YET: dict[str, list[str]] = {
    "docs/api.md": ["says", "thoughts"],
    "docs/llmadapter.md": ["asked for"],
    "docs/llmdeployment.md": ["asked for"],
    "engine/octavo_engine/server/generation/resume.py": ["says"],
    "router/octavo_router/discovery/dns_wire.py": ["says"],
    "router/octavo_router/discovery/kubernetes/watch.py": ["says"],
}
