"""Files and batches on disk, encrypted: what is there, what is read, what a crash leaves."""

from __future__ import annotations

import base64
import re
from random import Random
from typing import TYPE_CHECKING

import httpx
import pytest

from octavo_engine.encryption import EncryptionKeys
from octavo_engine.errors import ConfigError
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.openai.batches.shelf import FileStore, new_file_id
from octavo_engine.server.openai.batches.storage import Storage, StoredFileError
from tests.engine.server.batches.filing import begin, lines, question, upload
from tests.engine.server.batches.filing import content as results_of
from tests.fakes.process import serving

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = b"o" * 32, b"n" * 32
LINES = [b"%d: a line that nobody may read\n" % n for n in range(2000)]


@pytest.fixture(params=[None, OLD], ids=["plain", "encrypted"])
def storage(request) -> Storage:
    return Storage(None if request.param is None else EncryptionKeys([request.param]))


@pytest.fixture
def sealed() -> Storage:
    return Storage(EncryptionKeys([OLD]))


def write(storage: Storage, path: Path, *parts: bytes) -> None:
    with storage.write(path) as file:
        for part in parts:
            file.write(part)


def content(storage: Storage, path: Path) -> bytes:
    with storage.read(path) as file:
        return file.read()


def test_what_was_written_is_read_as_bytes_and_as_lines(tmp_path, storage):
    path = tmp_path / "file"
    with storage.write(path) as file:
        for line in LINES:
            file.write(line)
        assert file.tell() == len(b"".join(LINES))
    assert content(storage, path) == b"".join(LINES)
    with storage.read(path) as file:
        assert list(file) == LINES
    assert storage.length(path) == len(b"".join(LINES))


def test_lines_are_added_to_a_file_opened_again(tmp_path, storage):
    path = tmp_path / "file"
    for half in (LINES[:3], LINES[3:9]):
        with storage.append(path) as file:
            for line in half:
                file.write(line)
                file.flush()
    assert content(storage, path) == b"".join(LINES[:9])
    assert storage.length(path) == len(b"".join(LINES[:9]))


def test_an_empty_file_is_empty(tmp_path, storage):
    path = tmp_path / "file"
    write(storage, path)
    storage.check(path)
    assert (content(storage, path), storage.length(path), path.stat().st_size) == (b"", 0, 0)


def test_nothing_that_was_written_is_on_disk(tmp_path, sealed):
    write(sealed, tmp_path / "file", *LINES)
    assert b"nobody" not in (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_file_cut_off_at_any_byte_keeps_its_whole_lines(tmp_path, is_sealed):
    storage = Storage(EncryptionKeys([OLD]) if is_sealed else None)
    path = tmp_path / "file"
    ends = []
    with storage.append(path) as file:
        for line in LINES[:3]:
            file.write(line)
            file.flush()
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        storage.drop_half(path)
        kept = sum(end <= cut for end in ends)
        assert content(storage, path) == b"".join(LINES[:kept]), cut
        with storage.append(path) as file:  # and it goes on from there
            file.write(b"more\n")
        assert content(storage, path) == b"".join([*LINES[:kept], b"more\n"]), cut


def test_what_was_cut_off_or_changed_is_not_read(tmp_path, sealed):
    path = tmp_path / "file"
    write(sealed, path, b"x" * 1000)
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:], b"plain\n" * 9):
        path.write_bytes(broken)
        with pytest.raises(StoredFileError):
            content(sealed, path)


def test_any_bytes_are_content_or_an_error(tmp_path, sealed):
    path, random = tmp_path / "file", Random(7)
    write(sealed, path, b"x" * 100)
    whole = path.read_bytes()
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(random.randrange(1, 5)):
            broken[random.randrange(len(broken))] = random.randrange(256)
        path.write_bytes(broken[: random.randrange(len(broken) + 1)])
        for read in (content, Storage.length, Storage.check, Storage.drop_half):
            try:
                read(sealed, path)
            except StoredFileError as error:
                assert str(error)


def store(folder: Path, *keys: bytes) -> FileStore:
    storage = Storage(EncryptionKeys(keys) if keys else None)
    return FileStore(str(folder), RequestLimits(), storage=storage)


def with_file(folder: Path, *keys: bytes) -> str:
    shelf = store(folder, *keys)
    path = shelf.upload_path()
    write(shelf.storage, path, b"a secret line\n")
    file_id = new_file_id()
    shelf.keep(path, file_id=file_id, name="n", purpose="batch", owner="", keeps_s=None)
    assert shelf.files[file_id].file.bytes == len(b"a secret line\n")
    shelf.close()
    return file_id


def test_old_keys_read_after_a_rotation(tmp_path):
    file_id = with_file(tmp_path, OLD)
    shelf = store(tmp_path, NEW, OLD)
    assert content(shelf.storage, shelf.content_path(file_id)) == b"a secret line\n"
    shelf.close()


@pytest.mark.parametrize(
    ("written", "read", "sentence"),
    [
        ((OLD,), (NEW,), "which --encryption-key-file does not have"),
        ((OLD,), (), "it is encrypted; start with --encryption-key-file"),
        ((), (OLD,), "it is not encrypted, and --encryption-key-file is given"),
    ],
)
def test_files_of_other_keys_are_an_error_at_the_start(tmp_path, written, read, sentence):
    file_id = with_file(tmp_path, *written)
    with pytest.raises(ConfigError, match=sentence) as refused:
        store(tmp_path, *read)
    assert file_id in str(refused.value)
    store(tmp_path, *written).close()  # nothing was changed, and the folder is not locked


def test_the_content_counts_too_not_the_record_alone(tmp_path):
    file_id = with_file(tmp_path, OLD)
    write(Storage(EncryptionKeys([NEW])), tmp_path / "files" / file_id, b"other\n")
    with pytest.raises(ConfigError, match="does not have"):
        store(tmp_path, OLD)


@pytest.mark.slow
def test_no_prompt_and_no_answer_is_in_any_file_of_a_server(tmp_path):
    """Files, batches and KV blocks of a server that has keys: all bytes of all its files."""
    keys = tmp_path / "keys"
    keys.write_text(base64.b64encode(NEW).decode())
    folder, said = tmp_path / "data", "zebra-canary-417 " * 40
    flags = ("--served-model-name", "sim", "--max-model-len", "2048",
             "--files-dir", str(folder / "files"), "--kv-disk-path", str(folder / "kv"),
             "--encryption-key-file", str(keys))  # fmt: skip

    def over(client, batch):
        while client.get(f"/v1/batches/{batch['id']}").json()["status"] != "completed":
            pass
        return client.get(f"/v1/batches/{batch['id']}").json()

    with (
        serving("m", *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        requests = lines(*(question(f"zebra-{n}", prompt=said, model="sim") for n in range(3)))
        batch = over(client, begin(client, requests, metadata={"about": "zebra"}))
        upload(client, requests, data={}).raise_for_status()
        answers = results_of(client, batch["output_file_id"])
        assert [answer["custom_id"] for answer in answers] == ["zebra-0", "zebra-1", "zebra-2"]
        assert client.get(f"/v1/files/{batch['input_file_id']}/content").content == requests
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any(path.suffix == ".kv" for path in found)
    assert len([path for path in found if path.parent.name == "files"]) == 7  # and the lock
    for path, data in found.items():
        for text in (b"zebra", b"custom_id", b"completed", b"chat.completion", b"in.jsonl"):
            assert text not in data, path
    with (  # and a server with the key that comes later finds all of it
        serving("m", *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        assert results_of(client, batch["output_file_id"]) == answers
        body = {"model": "sim", "prompt": said, "max_tokens": 1}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        metrics = client.get("/metrics").text
    assert re.search(r'^octavo_kv_tier_hit_blocks_total{.*tier="disk".*} [1-9]', metrics, re.M)
