"""Broken, slow, changing and lying servers: whole in the end, or a clear reason."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import pytest

from octavo.fetch.errors import FetchError, FetchReason
from octavo.fetch.fetch import FetchRequest, fetch
from octavo.fetch.folder import LOCK_FILE, MARK_FILE
from octavo.fetch.parts import FOLDER
from octavo.fetch.progress import STATUS_FILE, FetchProgress
from octavo.fetch.transfer import TransferPatience
from tests.fakes.model_store import Store, StoreReply, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from octavo.fetch.folder import FolderMark

CONTENT = random.Random(7).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "tiny.gguf"
QUICK = TransferPatience(num_failures=4, first_s=0.0, longest_s=0.0)


@pytest.fixture
def store() -> Iterator[Store]:
    with serving(Store(files={f"/{NAME}": CONTENT})) as store:
        yield store


def request(store: Store, folder: Path, path: str = f"/{NAME}") -> FetchRequest:
    return FetchRequest(
        uri=store.url + path, folder=folder, range_bytes=50_000, patience=QUICK, stall_s=5.0
    )


def run(requested: FetchRequest, out: StringIO | None = None) -> FolderMark:
    with FetchProgress(requested.uri, out=out or StringIO()) as progress:
        return fetch(requested, progress, environ={}, sleep=lambda seconds: None)


def refused(requested: FetchRequest) -> FetchError:
    with pytest.raises(FetchError) as caught:
        run(requested)
    return caught.value


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_fetched_in_parallel_ranges_and_marked(store, tmp_path):
    mark = run(request(store, tmp_path))

    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert (mark.digest, mark.files) == (f"sha256:{SHA256}", ((NAME, len(CONTENT), SHA256),))
    assert sorted(store.ranges(), key=lambda span: int(span[6:].partition("-")[0])) == [
        f"bytes={at}-{at + 49_999}" for at in range(0, 300_000, 50_000)
    ]
    assert names(tmp_path) == {NAME, MARK_FILE, STATUS_FILE}


def test_a_second_fetch_asks_nobody(store, tmp_path):
    run(request(store, tmp_path))
    store.requested.clear()

    assert run(request(store, tmp_path)).digest == f"sha256:{SHA256}"
    assert store.requested == []


def test_a_file_that_was_cut_after_the_mark_is_fetched_again(store, tmp_path):
    run(request(store, tmp_path))
    (tmp_path / NAME).write_bytes(CONTENT[:-1])

    run(request(store, tmp_path))
    assert (tmp_path / NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("seed", range(8))
def test_breaks_at_random_bytes_cost_only_what_was_lost(store, tmp_path, seed):
    rng = random.Random(seed)
    store.cuts = [rng.randrange(1, 50_000) for _ in range(rng.randrange(1, 9))]

    run(request(store, tmp_path))
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert store.cuts == []


def test_a_range_goes_on_at_the_byte_where_it_broke(store, tmp_path):
    store.cuts = [12_345]
    run(replace(request(store, tmp_path), range_bytes=10**6, num_workers=1))
    assert store.ranges() == ["bytes=0-999999", "bytes=12345-299999"]


@pytest.mark.parametrize("kind", ["cuts", "stalls"])
def test_a_later_range_does_so_too(store, tmp_path, kind):
    store.on_answer = lambda requested: (
        getattr(store, kind).append(777) if len(store.requested) == 2 else None
    )
    run(replace(request(store, tmp_path), range_bytes=200_000, num_workers=1, stall_s=0.5))

    assert store.ranges() == ["bytes=0-199999", "bytes=200000-299999", "bytes=200777-299999"]
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_a_silent_server_is_left_and_asked_again(store, tmp_path):
    store.stalls = [1000]

    run(replace(request(store, tmp_path), stall_s=0.2))
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_an_interrupted_fetch_goes_on_where_it_was(store, tmp_path):
    """Nobody answers any more after three ranges; the next run fetches the other three only."""
    requested = replace(request(store, tmp_path), num_workers=1)
    store.routes["/"] = lambda each: StoreReply(503) if len(store.requested) > 3 else None
    assert refused(requested).reason is FetchReason.UNREACHABLE
    assert not (tmp_path / NAME).exists() and (tmp_path / FOLDER).is_dir()

    store.routes.clear()
    store.requested.clear()
    run(requested)
    assert store.ranges() == [f"bytes={at}-{at + 49_999}" for at in (150_000, 200_000, 250_000)]
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_what_changed_between_two_runs_is_fetched_from_the_start(store, tmp_path):
    requested = replace(request(store, tmp_path), num_workers=1)
    store.routes["/"] = lambda each: StoreReply(503) if len(store.requested) > 3 else None
    refused(requested)

    store.routes.clear()
    other = CONTENT[::-1]
    store.files[f"/{NAME}"] = other
    run(requested)
    assert (tmp_path / NAME).read_bytes() == other


def test_what_changes_under_us_is_never_mixed(store, tmp_path):
    other = CONTENT[::-1]
    store.on_answer = lambda requested: (
        store.files.update({f"/{NAME}": other}) if len(store.requested) == 3 else None
    )
    run(replace(request(store, tmp_path), num_workers=1))

    assert (tmp_path / NAME).read_bytes() == other


def test_a_weak_etag_is_compared_but_not_sent(store, tmp_path):
    store.etag = 'W/"1"'
    run(request(store, tmp_path))

    assert not any("if-range" in requested.headers for requested in store.requested)


def test_a_server_without_ranges_is_read_in_one_piece(store, tmp_path):
    store.knows_ranges = False
    store.cuts = [70_000]
    run(request(store, tmp_path))

    assert len(store.requested) == 2
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_an_empty_file_is_one(store, tmp_path):
    store.files[f"/{NAME}"] = b""
    assert run(request(store, tmp_path)).files[0].size == 0


def test_a_file_that_shrinks_starts_anew(store, tmp_path):
    """416 for a range that existed when it began."""
    store.on_answer = lambda requested: (
        store.files.update({f"/{NAME}": CONTENT[:60_000]}) if len(store.requested) == 2 else None
    )
    run(replace(request(store, tmp_path), num_workers=1))
    assert (tmp_path / NAME).read_bytes() == CONTENT[:60_000]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, FetchReason.UNAUTHORIZED),
        (403, FetchReason.UNAUTHORIZED),
        (404, FetchReason.NOT_FOUND),
        (410, FetchReason.NOT_FOUND),
        (429, FetchReason.UNREACHABLE),
        (500, FetchReason.UNREACHABLE),
        (418, FetchReason.FAILED),
    ],
)
def test_every_refusal_has_its_reason(store, tmp_path, status, reason):
    store.routes["/"] = lambda requested: StoreReply(status)

    assert refused(request(store, tmp_path)).reason is reason
    assert len(store.requested) == (4 if reason is FetchReason.UNREACHABLE else 1)


def test_a_wrong_digest_leaves_nothing_that_could_be_taken_for_the_model(store, tmp_path):
    requested = replace(request(store, tmp_path), digest="sha256:" + "0" * 64)

    error = refused(requested)
    assert error.reason is FetchReason.DIGEST_MISMATCH
    assert SHA256 in str(error) and "0" * 64 in str(error)
    assert not (tmp_path / NAME).exists() and not (tmp_path / MARK_FILE).exists()
    assert run(replace(requested, digest=f"sha256:{SHA256}")).digest == f"sha256:{SHA256}"


def test_a_wrong_digest_is_seen_of_what_is_there_already(store, tmp_path):
    run(request(store, tmp_path))
    requested = replace(request(store, tmp_path), digest="sha256:" + "0" * 64)
    assert refused(requested).reason is FetchReason.DIGEST_MISMATCH


def test_a_folder_keeps_the_model_it_has(store, tmp_path):
    run(request(store, tmp_path))
    error = refused(request(store, tmp_path, "/other.gguf"))
    assert f"holds {store.url}/{NAME} already" in str(error)


def test_a_size_that_no_disk_has_is_not_begun(store, tmp_path):
    span = {"content-range": f"bytes 0-49999/{10**17}", "etag": '"x"'}
    store.routes["/"] = lambda requested: StoreReply(206, body=CONTENT[:50_000], headers=span)
    assert refused(request(store, tmp_path)).reason is FetchReason.DISK_FULL
    assert len(store.requested) == 1


def test_a_full_disk_is_named(store, tmp_path, monkeypatch):
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo.fetch.transfer.os.pwrite", full)
    error = refused(request(store, tmp_path))
    assert error.reason is FetchReason.DISK_FULL


def test_credentials_do_not_follow_a_redirect_to_another_host(store, tmp_path):
    with serving(Store(files={f"/{NAME}": CONTENT})) as other:
        elsewhere = other.url.replace("127.0.0.1", "localhost")
        store.routes["/"] = lambda requested: StoreReply(
            302, headers={"location": f"{elsewhere}/{NAME}"}
        )
        requested = request(store, tmp_path)
        with FetchProgress(requested.uri, out=StringIO()) as progress:
            fetch(requested, progress, environ={"HTTP_BEARER_TOKEN": "secret"})
        assert {each.headers.get("authorization") for each in store.requested} == {"Bearer secret"}
        assert not any("authorization" in each.headers for each in other.requested)
        assert len(other.ranges()) == 6


def test_credentials_follow_a_redirect_on_the_same_host(store, tmp_path):
    store.files["/moved.gguf"] = CONTENT
    store.routes[f"/{NAME}"] = lambda requested: StoreReply(
        307, headers={"location": "/moved.gguf"}
    )
    requested = request(store, tmp_path)
    with FetchProgress(requested.uri, out=StringIO()) as progress:
        fetch(requested, progress, environ={"HTTP_BEARER_TOKEN": "secret"})
    assert {each.headers.get("authorization") for each in store.requested} == {"Bearer secret"}


def test_redirects_end(store, tmp_path):
    store.routes["/"] = lambda requested: StoreReply(302, headers={"location": f"/{NAME}"})
    assert "redirects more than" in str(refused(request(store, tmp_path)))


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "http://169.254.169.254/x", "ftp://h/x", "gopher://h"]
)
def test_redirects_to_where_no_model_is_are_refused(store, tmp_path, target):
    store.routes["/"] = lambda requested: StoreReply(302, headers={"location": target})
    assert refused(request(store, tmp_path)).reason is FetchReason.FAILED
    assert not (tmp_path / NAME).exists()


def test_the_folder_form_takes_what_the_index_names(store, tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    store.files = {
        "/m/config.json": b"{}",
        "/m/model.safetensors.index.json": json.dumps(index).encode(),
        "/m/model-1.safetensors": b"one",
        "/m/model-2.safetensors": b"two",
        "/m/tokenizer.json": b"{}",
    }
    mark = run(request(store, tmp_path, "/m"))
    assert {file.name for file in mark.files} == {path[3:] for path in store.files}


@pytest.mark.parametrize("name", ["../../evil", "/etc/x", "a/../b", ".hidden", "a\n", ""])
def test_names_that_lead_elsewhere_are_refused(store, tmp_path, name):
    index = {"weight_map": {"a": name}}
    store.files = {
        "/m/config.json": b"{}",
        "/m/model.safetensors.index.json": json.dumps(index).encode(),
    }
    error = refused(request(store, tmp_path / "to", "/m"))
    assert "is not a plain file name" in str(error)
    assert names(tmp_path) == {"to"}


def test_progress_is_told_as_lines_and_as_a_file(store, tmp_path):
    out = StringIO()
    run(request(store, tmp_path), out)

    facts = json.loads((tmp_path / STATUS_FILE).read_text())
    assert facts["uri"] == f"{store.url}/{NAME}"
    assert next(json.loads(line)["phase"] for line in out.getvalue().splitlines()) == "fetching"


def test_people_get_a_line_for_each_phase_and_every_ten_seconds():
    out, now = StringIO(), [0.0]
    progress = FetchProgress("demo://m", out=out, is_for_people=True, clock=lambda: now[0])
    progress.report()
    progress.begin("fetching", total=4 * 2**20, files=1)
    for seconds, megabytes in ((1, 1), (9, 1), (10, 1)):
        now[0] = seconds
        progress.add(megabytes * 2**20)
        progress.report()
    assert out.getvalue().splitlines() == [
        "listing demo://m",
        "fetching demo://m  0.0 of 4.0 MiB, 0.0 MiB/s",
        "fetching demo://m  3.0 of 4.0 MiB, 0.2 MiB/s, 4 s left",
    ]


def test_the_lock_is_left_behind_by_nobody(store, tmp_path):
    store.routes["/"] = lambda requested: StoreReply(404)
    refused(request(store, tmp_path))
    assert LOCK_FILE not in names(tmp_path)
