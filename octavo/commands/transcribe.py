"""`octavo transcribe`: the text of a file of speech, from a running server."""

from __future__ import annotations

import http.client
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.http_client import ServerAddress, ServerError, ServerReply
from octavo.options.parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DESCRIPTION = """Write down the speech in an audio file.

The server must serve a Whisper model: octavo serve --model openai/whisper-base"""

DEFAULT_URL = "http://127.0.0.1:8000"
FORMATS = ("text", "json", "srt", "vtt", "verbose_json")
_TIMEOUT_S = 3600.0


def main(prog: str, argv: Sequence[str]) -> int:
    options = _parser(prog).parse_args(argv)
    fields = {
        "response_format": options.format,
        **({"model": options.model} if options.model else {}),
        **({"language": options.language} if options.language else {}),
        **({"prompt": options.prompt} if options.prompt else {}),
    }
    path = "/v1/audio/translations" if options.translate else "/v1/audio/transcriptions"
    key = options.api_key or os.environ.get("OCTAVO_API_KEY", "")
    sound = Path(options.file).read_bytes()
    try:
        reply = post_form(options.url, path, sound, fields, api_key=key)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServerError(f"no server answers at {options.url}: {reason}") from None
    if reply.status != 200 or reply.content_type == "text/html":
        raise ServerError(reply.error)
    text = b"".join(reply.body).decode("utf-8", "replace")
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    return 0


def post_form(
    url: str, path: str, sound: bytes, fields: Mapping[str, str], *, api_key: str = ""
) -> ServerReply:
    """The whole answer. Raises OSError, HTTPException, and ServerError for what is not a URL."""
    boundary = secrets.token_hex(16)
    parts = [
        f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    head = f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = "".join([*parts, head]).encode() + sound + f"\r\n--{boundary}--\r\n".encode()
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    place = ServerAddress.parse(url)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.host, place.port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", place.path + path, body, headers)
        response = connection.getresponse()
        media_type = response.headers.get_content_type()
        return ServerReply(status=response.status, content_type=media_type, body=[response.read()])
    finally:
        connection.close()


def _parser(prog: str) -> CommandParser:
    parser = CommandParser(prog, DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="wav; or flac, mp3, ogg, m4a")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the server ({DEFAULT_URL})")
    parser.add_argument("--api-key", help="or OCTAVO_API_KEY")
    parser.add_argument("--model", help="served name; default: the server's only one")
    parser.add_argument("--language", help="ISO 639-1 code; default: detected")
    parser.add_argument("--prompt", help="names and spellings to use")
    parser.add_argument("--format", choices=FORMATS, default="text")
    parser.add_argument("--translate", action="store_true", help="into English")
    return parser
