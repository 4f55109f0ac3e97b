"""Files that clients leave: uploads of every form, whose they are, and how long they stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo_engine.errors import ConfigError
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.openai.batches.shelf import FileStore, new_file_id
from tests.engine.server.batches.filing import filing, upload

if TYPE_CHECKING:
    import httpx


def test_an_upload_is_listed_fetched_and_deleted(tmp_path):
    content = bytes(range(256)) * 9000  # more than one piece
    with filing(tmp_path) as (_, client):
        file = upload(client, content).raise_for_status().json()
        assert (file["object"], file["bytes"], file["filename"]) == (
            "file",
            len(content),
            "in.jsonl",
        )
        assert file["id"].startswith("file-")
        assert client.get(f"/v1/files/{file['id']}").json() == file
        assert client.get("/v1/files").json()["data"] == [file]

        fetched = client.get(f"/v1/files/{file['id']}/content")
        assert fetched.content == content
        assert fetched.headers["content-disposition"] == "attachment"

        deleted = client.delete(f"/v1/files/{file['id']}").json()
        assert deleted == {"id": file["id"], "object": "file", "deleted": True}
        assert client.get(f"/v1/files/{file['id']}").status_code == 404
        assert client.delete(f"/v1/files/{file['id']}").status_code == 404
    assert [path.name for path in (tmp_path / "files").iterdir()] == []


def test_lists_come_in_pages(tmp_path):
    with filing(tmp_path) as (_, client):
        ids = [upload(client, b"%d" % n).json()["id"] for n in range(5)]
        first = client.get("/v1/files", params={"limit": 2}).json()
        assert [file["id"] for file in first["data"]] == ids[:2:-1]
        assert (first["has_more"], first["last_id"]) == (True, ids[3])
        rest = client.get("/v1/files", params={"after": ids[3]}).json()
        assert [file["id"] for file in rest["data"]] == ids[2::-1]
        assert rest["has_more"] is False
        assert client.get("/v1/files?order=asc").json()["first_id"] == ids[0]
        assert client.get("/v1/files?purpose=batch_output").json()["data"] == []
        for query, param in (("limit=0", "limit"), ("after=x", "after"), ("order=up", "order")):
            answer = client.get(f"/v1/files?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"file": ("a", b"x")}, {}, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "fine-tune"}, "purpose"),
        ({"other": ("a", b"x")}, {"purpose": "batch"}, "file"),
        ({"file": (None, b"x")}, {"purpose": "batch"}, "file"),
        ([("file", ("a", b"x")), ("file", ("b", b"y"))], {"purpose": "batch"}, "file"),
        ({"file": ("a", b"x")}, {"purpose": "b" * 2000}, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "batch", "expires_after[seconds]": "3600"},
         "expires_after[anchor]"),
        ({"file": ("a", b"x")}, {"purpose": "batch", "expires_after[anchor]": "created_at",
                                 "expires_after[seconds]": "5"}, "expires_after[seconds]"),
        ({"file": ("a", b"x")}, {"purpose": "batch", "expires_after[anchor]": "created_at"},
         "expires_after[seconds]"),
        ({"file": ("a", b"x")}, {f"field{n}": "" for n in range(20)}, None),
    ],
)  # fmt: skip
def test_an_upload_that_cannot_be_leaves_nothing(tmp_path, files, data, param):
    with filing(tmp_path) as (_, client):
        answer = client.post("/v1/files", files=files, data=data)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert list((tmp_path / "files").iterdir()) == []


def test_other_types_and_broken_forms_are_refused(tmp_path):
    kind = {"content-type": "multipart/form-data; boundary=b"}
    with filing(tmp_path) as (_, client):
        assert client.post("/v1/files", json={}).status_code == 415
        for body in (b"", b"nonsense", b'--b\r\ncontent-disposition: x; name="purpose"\r\n\r\nba'):
            answer = client.post("/v1/files", content=body, headers=kind)
            assert answer.status_code == 400
            assert "ends too early" in answer.json()["error"]["message"]
        answer = client.post("/v1/files", content=b"--b\r\n\r\n\r\n", headers=kind)
        assert answer.status_code == 400


def test_a_file_may_be_so_large_and_all_together_too(tmp_path):
    limits = RequestLimits(max_file_bytes=100_000, max_stored_file_bytes=150_000)
    with filing(tmp_path, limits=limits) as (_, client):
        assert upload(client, b"x" * 200_000).json()["error"]["code"] == "body_too_large"
        answer = client.post(
            "/v1/files", headers={"content-type": "multipart/form-data; boundary=b"},
            content=iter([b'--b\r\ncontent-disposition: f; name="file"; filename="a"\r\n\r\n',
                          b"x" * 200_000]),
        )  # fmt: skip
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        upload(client, b"x" * 100_000).raise_for_status()
        full = upload(client, b"x" * 60_000)
        assert (full.status_code, full.json()["error"]["code"]) == (413, "file_storage_full")
        upload(client, b"x" * 40_000).raise_for_status()
    assert len(list((tmp_path / "files").glob("*.part"))) == 0


def test_a_client_that_leaves_in_the_midst_leaves_nothing(tmp_path):
    def body():
        yield b'--b\r\ncontent-disposition: f; name="file"; filename="a"\r\n\r\n' + b"x" * 10_000
        raise ConnectionError("gone")

    with filing(tmp_path) as (server, client):
        with pytest.raises(ConnectionError):
            client.post(
                "/v1/files", headers={"content-type": "multipart/form-data; boundary=b"},
                content=body(),
            )  # fmt: skip
        upload(client, b"x").raise_for_status()
        while server.service.metrics.http_in_flight:
            client.get("/health")
        assert len(list((tmp_path / "files").iterdir())) == 2


def test_a_file_belongs_to_the_key_it_came_with(tmp_path):
    with filing(tmp_path, api_keys=("a", "b")) as (_, client):
        mine, yours = ({"authorization": f"Bearer {key}"} for key in "ab")
        assert upload(client, b"x").status_code == 401
        id_ = upload(client, b"x", headers=mine).json()["id"]
        assert client.get(f"/v1/files/{id_}", headers=mine).status_code == 200
        assert client.get("/v1/files", headers=yours).json()["data"] == []
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answer = client.request(method, f"/v1/files/{id_}{path}", headers=yours)
            assert answer.json()["error"]["code"] == "file_not_found"


# ── the folder ──


def kept(shelf: FileStore, content: bytes = b"x", keeps_s: int | None = None) -> str:
    path = shelf.upload_path()
    path.write_bytes(content)
    return shelf.keep(
        path, file_id=new_file_id(), name="a", purpose="batch", owner="", keeps_s=keeps_s
    ).id


def test_files_outlive_the_server(tmp_path):
    shelf = FileStore(str(tmp_path), RequestLimits())
    ids = [kept(shelf, b"one"), kept(shelf, b"two")]
    before = shelf.files
    shelf.close()
    again = FileStore(str(tmp_path), RequestLimits())
    assert list(again.files) == ids
    assert again.files == before
    assert again.content_path(ids[1]).read_bytes() == b"two"
    again.close()


def test_a_folder_has_one_server(tmp_path):
    shelf = FileStore(str(tmp_path), RequestLimits())
    with pytest.raises(ConfigError, match="another server uses it"):
        FileStore(str(tmp_path), RequestLimits())
    shelf.close()
    FileStore(str(tmp_path), RequestLimits()).close()


def test_a_folder_that_cannot_be_is_said_before_anything(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="--files-dir"):
        FileStore(str(tmp_path / "file"), RequestLimits())
    (tmp_path / "here" / "files").mkdir(parents=True)
    (tmp_path / "here" / "files" / "file-1.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"file-1\.json is not a valid record"):
        FileStore(str(tmp_path / "here"), RequestLimits())


def test_what_a_crash_left_half_done_is_cleared(tmp_path):
    shelf = FileStore(str(tmp_path), RequestLimits())
    whole, bare = kept(shelf), kept(shelf)
    shelf.content_path(bare).unlink()  # its record was written, its content not yet there
    shelf.upload_path().write_bytes(b"half")
    shelf.content_path("file-none").write_bytes(b"no record")
    shelf.close()
    again = FileStore(str(tmp_path), RequestLimits())
    assert list(again.files) == [whole]
    names = {path.name for path in (tmp_path / "files").iterdir()}
    assert names == {whole, f"{whole}.json"}
    again.close()


def test_a_file_goes_when_its_time_is_over(tmp_path):
    now = [1000.0]
    shelf = FileStore(str(tmp_path), RequestLimits(), now=lambda: now[0])
    id_ = kept(shelf, keeps_s=3600)
    assert shelf.file(id_, "").expires_at == 4600
    now[0] = 4600.0
    assert shelf.files_of("") == []
    assert not shelf.content_path(id_).exists()
    shelf.close()


def test_the_expiry_of_an_upload_is_what_was_asked(tmp_path):
    requested = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    with filing(tmp_path) as (_, client):
        file = upload(client, b"x", data=requested).raise_for_status().json()
        assert file["expires_at"] == file["created_at"] + 7200


def test_without_a_folder_the_routes_are_not_there():
    from tests.fakes.server import running

    with running() as server, server.client() as client:
        answer: httpx.Response = upload(client, b"x")
        assert answer.json()["error"]["code"] == "route_not_found"
