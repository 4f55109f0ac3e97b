"""Fixtures of the engine's tests that several folders share."""

import pytest

from tests.fakes.model_store import Store, serving
from tests.fakes.s3_bucket import Bucket


@pytest.fixture
def bucket(monkeypatch):
    with serving(Store()) as store:
        bucket = Bucket(store)
        for variable, value in bucket.environ().items():
            monkeypatch.setenv(variable, value)
        yield bucket


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path)
    request.getfixturevalue("bucket")
    return "s3://kv/blocks"
