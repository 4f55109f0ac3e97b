"""Every test of the hot path runs on the compiled one and on its slow twin."""

import pytest

from octavo_router.residency import native


@pytest.fixture(params=["compiled", "python"])
def hot_path(request):
    if request.param == "python":
        return native.in_python("a test asked for it")
    loaded = native.load()
    assert loaded.is_native, loaded.problem
    return loaded
