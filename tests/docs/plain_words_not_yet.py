"""Texts that still contain private words: `python -m tests.docs.plain_words`."""

from __future__ import annotations

# fmt: off
NOT_YET: dict[str, list[str]] = {
    "README.md": ["says", "told"],
    "docs/api.md": ["asked for", "news", "says", "thoughts"],
    "docs/errors.md": ["asked of", "makes no sense", "tells"],
    "octavo.options.flags": ["asked for", "nobody", "thoughts"],
    "octavo serve --help": ["asked for", "nobody", "thoughts"],
    "octavo chat --help": ["nobody"],
    "octavo complete --help": ["nobody"],
    "octavo run-batch --help": ["nobody"],
    "octavo bench --help": ["nobody"],
    "octavo operator --help": ["asked for"],
    "octavo --help": ["asked for"],
    "octavo_engine.server.http.errors.CATALOGUE": ["asked of", "makes no sense", "tells"],
    "engine/octavo_engine/server/compat/render.py": ["told"],
    "engine/octavo_engine/server/generation/resume.py": ["says"],
    "engine/octavo_engine/server/openai/chat/output_format.py": ["thoughts", "told"],
    "engine/octavo_engine/server/openai/chat/prepare.py": ["told"],
    "engine/octavo_engine/server/openai/completions.py": ["thoughts", "told"],
    "router/octavo_router/discovery/dns_wire.py": ["says"],
    "router/octavo_router/discovery/kubernetes/watch.py": ["says"],
    "router/octavo_router/signals/follow.py": ["told"],
}
