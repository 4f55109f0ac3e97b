"""The limit of open files is raised as far as it may be, and never lowered."""

from __future__ import annotations

import resource

import pytest

from octavo_common.file_limit import raise_file_limit

NO_BOUND = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "raised"),
    [
        (1024, 4096, None, 4096),
        (1024, 4096, 2000, 2000),
        (1024, 4096, 9000, 4096),
        (1024, 4096, 500, 1024),
        (4096, 4096, None, 4096),
        (1024, NO_BOUND, None, 65536),
        (1024, NO_BOUND, 9000, 9000),
        (90000, NO_BOUND, None, 90000),
    ],
)
def test_the_soft_limit_is_raised_to_what_is_wanted_and_allowed(
    monkeypatch, soft, hard, wanted, raised
):
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    assert raise_file_limit(wanted) == raised
    assert limits == {resource.RLIMIT_NOFILE: (raised, hard)}


def test_without_any_limit_there_is_as_much_as_is_wanted(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (NO_BOUND, NO_BOUND))
    assert raise_file_limit(9000) == 9000


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_system_that_allows_less_than_it_says_changes_nothing(monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, NO_BOUND))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 256
