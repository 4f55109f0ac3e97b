"""OpenAI's own client: files and batches on a server process that is killed in the midst."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest

from tests.fakes.process import serving

URL: Literal["/v1/chat/completions"] = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
FLAGS = ("m", "--served-model-name", "sim", "--api-key", "secret", "--max-model-len", "512")


def requests_of(count: int) -> bytes:
    return b"".join(
        json.dumps({
            "custom_id": f"r{n}", "method": "POST", "url": URL,
            "body": {"model": "sim", "messages": HI, "max_tokens": 8, "seed": n},
        }).encode() + b"\n"
        for n in range(count)
    )  # fmt: skip


def finished(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    """It has a deadline of its own; the test has the client's."""
    while (batch := client.batches.retrieve(batch_id)).completed_at is None:
        assert batch.status in ("validating", "in_progress", "finalizing")
    return batch


@pytest.fixture
def folder(tmp_path):
    return ("--files-dir", str(tmp_path / "kept"))


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0)


@pytest.mark.slow
def test_a_batch_outlives_the_death_of_its_server(folder):
    slow = ("--batch-concurrency", "2", "--sim-time-scale", "1")
    with serving(*FLAGS, *folder, *slow) as server, connect(server.url) as client:
        file = client.files.create(
            file=("in.jsonl", requests_of(12)), purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )  # fmt: skip
        assert (file.status, file.purpose) == ("processed", "batch")
        assert client.files.content(file.id).content == requests_of(12)
        batch = client.batches.create(
            input_file_id=file.id, endpoint=URL, completion_window="24h", metadata={"a": "b"}
        )
        while not (counts := client.batches.retrieve(batch.id).request_counts):
            pass
        while client.batches.retrieve(batch.id).request_counts.completed < 2:  # type: ignore[union-attr]  # it was there
            assert counts.failed == 0
        server.process.kill()
        server.process.wait(60)

    with (
        serving(*FLAGS, *folder, "--sim-time-scale", "0.1") as server,
        connect(server.url) as client,
    ):
        done = finished(client, batch.id)
        assert (done.status, done.metadata) == ("completed", {"a": "b"})
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed) == (12, 12)
        assert done.output_file_id is not None
        answers = [
            json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()
        ]
        assert [answer["custom_id"] for answer in answers] == [f"r{n}" for n in range(12)]
        for n, answer in enumerate(answers):  # those before and those after the death alike
            direct = client.chat.completions.create(
                model="sim",
                messages=HI,
                max_tokens=8,
                seed=n,
            )
            content = answer["response"]["body"]["choices"][0]["message"]["content"]
            assert content == direct.choices[0].message.content

        assert [each.id for each in client.batches.list()] == [batch.id]
        assert {each.id for each in client.files.list()} == {file.id, done.output_file_id}
        assert client.files.retrieve(file.id).filename == "in.jsonl"
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match="No such File"):
            client.files.retrieve(file.id)


@pytest.mark.slow
def test_a_batch_is_cancelled(folder):
    with (
        serving(*FLAGS, *folder, "--sim-time-scale", "20") as server,
        connect(server.url) as client,
    ):
        file = client.files.create(file=("in.jsonl", requests_of(3)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        while (now := client.batches.retrieve(batch.id)).status == "cancelling":
            pass
        assert now.status == "cancelled"
        assert now.cancelled_at is not None
