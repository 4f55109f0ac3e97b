"""What can go wrong with a cluster for tests; each message says what to do."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """It cannot be built, started, reached or ended."""
