"""The real API server that `cluster` tests share, and a namespace of their own for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.apiserver import build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.apiserver import ApiServer


def pytest_collection_finish(session: pytest.Session) -> None:
    """A first build takes minutes: here it counts against no test's time limit."""
    wanted = any("apiserver" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not build.why_not() and not session.config.option.collectonly:
        build.commands()


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A running kube-apiserver with our CRDs: see tests.fakes.apiserver.ApiServer.

    Shared by the whole run, so write into `namespace` only. A test that takes the CRD away, brings
    others, or restarts the server leaves all as it was; nothing runs beside it. There are no
    controllers: tests set the status of Deployments and make pods themselves, and deletes do not
    cascade.
    """
    if reason := build.why_not():
        pytest.skip(reason)
    from tests.fakes.apiserver import ADAPTER_CRD_FILE, CRD_FILE, ApiServer

    with ApiServer.start() as server:
        server.install(CRD_FILE)
        server.install(ADAPTER_CRD_FILE)
        yield server


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """A new namespace that nobody else uses."""
    return apiserver.make_namespace()


@pytest.fixture(scope="session")
def shared_namespace(apiserver: ApiServer) -> str:
    """For tests that write nothing: dry runs."""
    return apiserver.make_namespace()
