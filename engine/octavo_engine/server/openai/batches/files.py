"""/v1/files: uploads for batches, and what batches make, to list, fetch and delete."""

from __future__ import annotations

import asyncio
from typing import IO, TYPE_CHECKING, Literal

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.admin.dev import read_query
from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.multipart import FormReader, PartBegan, boundary_of
from octavo_engine.server.http.owner import owner_of
from octavo_engine.server.openai.batches import shapes
from octavo_engine.server.openai.batches.runner import check_expiry
from octavo_engine.server.openai.batches.shelf import new_file_id
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    from octavo_engine.server.openai.batches.shapes import BatchObject, FileObject
    from octavo_engine.server.openai.batches.shelf import FileStore

    Listed = TypeVar("Listed", FileObject, BatchObject)

MAX_FILES_LISTED = 10_000
MAX_NAME_CHARS = 255
_MAX_FIELD_BYTES = 1024
_PIECE_BYTES = 2**20  # written and read at once, on a thread: a disk may be slow
_FORM_ROOM = 65536  # of an upload, beside the file itself


async def upload_file(exchange: Exchange, service: Service) -> None:
    shelf = shelf_of(service)
    reader = FormReader(boundary_of(exchange.header(b"content-type")))
    declared = exchange.header(b"content-length")
    if declared.isdigit():
        shelf.check_room(max(int(declared) - _FORM_ROOM, 0))
    path = shelf.upload_path()
    try:
        with shelf.storage.write(path) as target:
            form = await _received(exchange, service, reader, target)
        purpose, keeps_s = _checked(form)
        shelf.check_room(shelf.storage.length(path))
        file = shelf.keep(
            path, file_id=new_file_id(), name=form.filename, purpose=purpose,
            owner=owner_of(exchange, service.guard).hex(), keeps_s=keeps_s,
        )  # fmt: skip
    finally:
        path.unlink(missing_ok=True)
    await exchange.reply(msgspec.json.encode(file))


async def list_files(exchange: Exchange, service: Service) -> None:
    query = read_query(exchange, shapes.FilesQuery)
    files = shelf_of(service).files_of(owner_of(exchange, service.guard).hex())
    if query.purpose is not None:
        files = [file for file in files if file.purpose == query.purpose]
    if query.order == "desc":
        files.reverse()
    page, more = cut_page(files, query.after, query.limit, most=MAX_FILES_LISTED)
    answer = shapes.FileList(
        object="list", data=page, has_more=more,
        first_id=page[0].id if page else None, last_id=page[-1].id if page else None,
    )  # fmt: skip
    await exchange.reply(msgspec.json.encode(answer))


async def get_file(exchange: Exchange, service: Service) -> None:
    await exchange.reply(msgspec.json.encode(_found(exchange, service)))


async def delete_file(exchange: Exchange, service: Service) -> None:
    """A batch that reads it goes on."""
    file = _found(exchange, service)
    shelf_of(service).drop_file(file.id)
    answer = shapes.DeletedFile(id=file.id, object="file", deleted=True)
    await exchange.reply(msgspec.json.encode(answer))


async def get_content(exchange: Exchange, service: Service) -> None:
    file = _found(exchange, service)
    shelf = shelf_of(service)
    with shelf.storage.read(shelf.content_path(file.id)) as source:
        await exchange.open_stream(
            [
                (b"content-type", b"application/octet-stream"),
                (b"content-length", str(file.bytes).encode()),
                (b"content-disposition", b"attachment"),  # a browser must not show it as ours
            ]
        )
        async with exchange.while_present():
            while piece := await asyncio.to_thread(source.read, _PIECE_BYTES):
                await exchange.write(piece)
            await exchange.close()


def shelf_of(service: Service) -> FileStore:
    assert service.batches is not None  # its routes are not there otherwise
    return service.batches.shelf


def cut_page(
    items: Sequence[Listed], after: str | None, limit: int | None, *, most: int, usual: int = 0
) -> tuple[list[Listed], bool]:
    """A page of a list, and whether there is more. Raises InvalidRequest."""
    limit = (usual or most) if limit is None else limit
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit must be between 1 and {most}; got {limit}", param="limit")
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            raise InvalidRequest(f"after: nothing has the id {after[:128]}", param="after")
        start = places[0] + 1
    return list(items[start : start + limit]), len(items) > start + limit


class _Form:
    """What came beside the file."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.has_file = False


async def _received(
    exchange: Exchange, service: Service, reader: FormReader, target: IO[bytes]
) -> _Form:
    """The form, once its file lies in `target`. Raises RequestError."""
    limit = service.settings.limits.max_file_bytes
    form, field, size = _Form(), "", 0
    waiting = bytearray()
    async for chunk in exchange.chunks(limit + _FORM_ROOM):
        for event in reader.feed(chunk):
            if isinstance(event, PartBegan):
                field = _begun(form, event)
            elif field == "file":
                size += len(event)
                waiting += event
            else:
                form.fields[field] += event.decode("utf-8", "replace")
                if len(form.fields[field]) > _MAX_FIELD_BYTES:
                    raise InvalidRequest(f"{field} is too long", param=field)
        if size > limit:
            raise HttpError(
                413,
                f"the file is larger than {limit} bytes",
                code="body_too_large",
                headers=((b"connection", b"close"),),
            )
        if len(waiting) >= _PIECE_BYTES:
            await asyncio.to_thread(target.write, waiting)
            waiting = bytearray()
    if not reader.is_whole:
        raise InvalidRequest("the body is not valid multipart/form-data: it ends too early")
    await asyncio.to_thread(target.write, waiting)
    return form


def _begun(form: _Form, part: PartBegan) -> str:
    if part.name in form.fields or (part.name == "file" and form.has_file):
        raise InvalidRequest(f"{part.name[:64]} was given twice", param=part.name[:64])
    if part.name == "file":
        if part.filename is None:
            raise InvalidRequest("file must be a file, with a filename", param="file")
        form.has_file, form.filename = True, part.filename[:MAX_NAME_CHARS] or "upload"
    elif len(form.fields) >= 16:
        raise InvalidRequest("the form has too many fields")
    else:
        form.fields[part.name] = ""
    return part.name


def _checked(form: _Form) -> tuple[Literal["batch"], int | None]:
    """The purpose, and how long the file is kept. Raises InvalidRequest."""
    if not form.has_file:
        raise InvalidRequest("file is required", param="file")
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        shown = "none" if purpose is None else purpose[:64]
        raise InvalidRequest(
            f"purpose must be batch; got {shown}",
            param="purpose",
        )
    anchor = form.fields.get("expires_after[anchor]")
    seconds = form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return "batch", None
    if anchor != "created_at":
        raise InvalidRequest(
            "expires_after[anchor] must be created_at", param="expires_after[anchor]"
        )
    if seconds is None or not (seconds.isascii() and seconds.isdigit()):
        raise InvalidRequest(
            "expires_after[seconds] must be a whole number", param="expires_after[seconds]"
        )
    check_expiry(int(seconds), "expires_after[seconds]")
    return "batch", int(seconds)


def _found(exchange: Exchange, service: Service) -> FileObject:
    id_ = str(exchange.scope["path_params"]["file_id"])
    return shelf_of(service).file(id_, owner_of(exchange, service.guard).hex())
