"""Every endpoint is asked at random what its description allows and forbids, and raw nonsense too.

The short version of `make fuzz`: the same seeds every time.
"""

from __future__ import annotations

import httpx
import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.api_fuzz import Contract, Fuzz, check_raw, raw_requests, send_raw
from tests.fakes.simulated import simulating

pytestmark = pytest.mark.slow

# The wide ones; `make fuzz` asks all.
ROUTES = ["/v1/completions", "/tokenize", "/detokenize", "/rerank", "/v1/load_lora_adapter",
          "/v1/batches"]  # fmt: skip


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("files"))
    settings = ServerSettings(dev_mode=True, tokenizer_info=True, files_dir=folder)
    with simulating(settings=settings) as server, httpx.Client(timeout=20) as client:
        document = client.get(server.url + "/openapi.json").json()
        yield Fuzz(server, client, Contract(document))


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_made_up_requests_are_answered_as_described_and_leave_nothing_behind(fuzz, mode):
    for number, path in enumerate(ROUTES):
        fuzz.batch("POST", path, mode, examples=6, number=number)
    assert fuzz.statuses[400] > 5
    if mode == "positive":
        assert fuzz.statuses[200] > 5


def test_raw_bytes_are_answered_or_refused_and_leave_nothing_behind(fuzz):
    for data in raw_requests(1, 150):
        check_raw(data, send_raw(fuzz.server.port, data))
    fuzz.server.check_idle()
    assert fuzz.client.get(fuzz.server.url + "/health").status_code == 200
