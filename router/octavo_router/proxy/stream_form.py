"""How the streams of a path are written: by what their ends and their errors are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StreamForm:
    """Our engines end each event with two line feeds."""

    ends: tuple[bytes, ...]  # how the event that ends a stream begins
    errors: tuple[bytes, ...]
    # Whether events depend on those before them: the stream is resumed with the pieces that its
    # tokens came in, and with the number of events that were seen.
    is_items: bool = False


DONE: Final = b"data: [DONE]\n\n"
CHUNKS: Final = StreamForm(ends=(DONE,), errors=(b'data: {"error":',))
RESPONSE_ITEMS: Final = StreamForm(
    ends=(b"event: response.completed\n", b"event: response.incomplete\n"),
    errors=(b"event: error\n",),
    is_items=True,
)
MESSAGE_BLOCKS: Final = StreamForm(
    ends=(b"event: message_stop\n",), errors=(b"event: error\n",), is_items=True
)
