"""Documented fields that would change the answer and that we cannot honour yet: refused by name.

Each row names a field and says which of its values change nothing; any other value is a 400. What
is not listed here and not in the schemas (user, metadata, store, …) is accepted and has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.server.http.errors import not_supported

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec


def _empty(value: Any) -> bool:
    return value in ("", [], {})


HARMLESS: dict[str, Callable[[Any], bool]] = {
    "best_of": lambda value: value == 1,
    "prompt_embeds": _empty,
    "ec_transfer_params": _empty,
    "vllm_xargs": _empty,
    "watermarking": lambda value: value is False,
    "prompt_logprob_token_ids": _empty,
    "suffix": _empty,
    "modalities": lambda value: value in (["text"], []),
}


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Raises RequestError (400, not_supported) that names the field."""
    for field, is_harmless in HARMLESS.items():
        value = getattr(request, field, None)
        if value is not None and not is_harmless(value):
            raise not_supported(field)
