"""The tree of docs/tree.md names every room, and a feature is where the tree leads one to look."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

TREE = re.search(r"```\n(.*?)```", (ROOT / "docs" / "tree.md").read_text(), re.DOTALL)
PACKAGES = (
    "common/octavo_common",
    "engine/octavo_engine",
    "engine/octavo_engine/core",
    "engine/octavo_engine/server",
    "router/octavo_router",
    "operator/octavo_operator",
    "octavo",
)
FEATURES = {
    "finding stop strings in streamed text": "engine/octavo_engine/tokenization/stop_strings.py",
    "checking API keys of the engine's server": "engine/octavo_engine/server/http/auth.py",
    "judging a canary revision": "operator/octavo_operator/decide/canary.py",
    "the router's retry budget": "router/octavo_router/flow/budget.py",
    "looking up a cached prefix": "engine/octavo_engine/kv/prefix_cache.py",
    "reading GGUF files": "engine/octavo_engine/weights/gguf.py",
    "streaming /v1/messages": "engine/octavo_engine/server/anthropic/answer.py",
    "leader election": "operator/octavo_operator/cluster/leader.py",
    "TLS contexts": "common/octavo_common/tls.py",
    "which JSON schemas can be enforced": "engine/octavo_engine/grammar/schema.py",
    "finding engines by DNS": "router/octavo_router/discovery/resolver.py",
    "beam search over HTTP": "engine/octavo_engine/server/generation/beam_search.py",
    "noticing that the core hangs": "engine/octavo_engine/core/process/supervision.py",
    "downloading from S3": "octavo/fetch/s3.py",
    "pushing load to routers": "engine/octavo_engine/server/routers/push_stream.py",
    "how many drafts are tried": "engine/octavo_engine/scheduling/speculation.py",
    "status conditions": "operator/octavo_operator/report/status.py",
    "attention on CPUs": "csrc/cpu/attention.cpp",
    "the router's debug pages": "router/octavo_router/admin/debug.py",
    "Mistral's tool calls": "engine/octavo_engine/dialects/mistral_calls.py",
}


def tree() -> str:
    assert TREE is not None
    return TREE.group(1)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_named(package):
    rooms = sorted(path.parent.name for path in (ROOT / package).glob("*/__init__.py"))
    assert [room for room in rooms if not re.search(rf"\b{room}/", tree())] == []


@pytest.mark.parametrize(("feature", "file"), FEATURES.items())
def test_a_feature_is_where_the_tree_says(feature, file):
    assert (ROOT / file).is_file(), feature
    room = file.rsplit("/", 2)[1]
    assert re.search(rf"\b{room}/?", tree()), room
