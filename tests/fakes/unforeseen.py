"""Faults of ours that nobody foresaw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from octavo_engine.state.request import EngineRequest


def fail_for(monkeypatch: pytest.MonkeyPatch, part: object, method: str, request_id: str) -> None:
    """The method raises RuntimeError for that request, and does what it did for others."""
    take = getattr(part, method)

    def explode(request: EngineRequest, *others: Any) -> Any:
        if request.request_id == request_id:
            raise RuntimeError("unforeseen")
        return take(request, *others)

    monkeypatch.setattr(part, method, explode)
