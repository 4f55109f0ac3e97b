"""Policies of other packages: found by name, made once, and never able to break a request."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config import plugins
from octavo_router.config.check import check
from octavo_router.config.settings import RouterConfig, RoutingConfig
from octavo_router.errors import ConfigInvalid
from octavo_router.residency.underway import PyUnderway
from octavo_router.routing.build import build_policy, policy_names
from octavo_router.routing.plugins import PluginPolicy
from tests.fakes.endpoints import make_endpoint, make_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_router.routing.policies import Policy

EXAMPLE = Path(__file__).parents[3] / "examples" / "routing_policy_plugin"
LAST = f"{__name__}:Last"


class Last:
    name = "last"
    reason = "the last one"
    places_adapters = False
    place: Any = -1

    def pick(self, request, candidates, matched):
        if isinstance(self.place, Exception):
            raise self.place
        return len(candidates) - 1 if self.place == -1 else self.place

    def explain(self, request, candidates, matched):
        if isinstance(self.place, Exception):
            raise self.place
        return [{"place": i} for i in range(len(candidates))]


class Broken(Last):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class Half:
    name = "half"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Entry points as if packages had them."""
    sys.modules.setdefault(__name__, sys.modules[Last.__module__])

    def names(**values: str) -> None:
        points = [EntryPoint(name, value, plugins.GROUP) for name, value in values.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: points)

    return names


def built(name: str) -> Policy:
    return build_policy(name, RouterConfig().routing, PyUnderway(), Random(1))


def pick(policy: Policy) -> int:
    return policy.pick(make_request(("a", 100)), [make_endpoint(i) for i in range(3)], [0, 0, 0])


def config(**routing: Any) -> RouterConfig:
    config = RouterConfig(routing=RoutingConfig(**routing))
    check(config)
    return config


def test_an_installed_policy_decides(install):
    install(last=LAST)
    policy = built("last")
    assert pick(policy) == 2
    assert (policy.name, policy.reason) == ("last", "the last one")
    assert policy.explain(make_request(), [make_endpoint()], [0]) == [{"place": 0.0}]
    assert policy_names(RouterConfig().routing)[-1] == "last"


def test_the_configuration_takes_its_name(install):
    install(last=LAST)
    assert config(policy="last", shadows=["last"]).routing.policy == "last"
    with pytest.raises(ConfigInvalid, match=r"no policy 'lsat'; did you mean 'last'"):
        config(policy="lsat")


def test_a_built_in_name_is_not_replaced(install):
    install(random=LAST)
    assert not isinstance(built("random"), PluginPolicy)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (f"{__name__}:Broken", r"cannot be loaded: RuntimeError\('no licence'\)"),
        ("no_such_module:Policy", "cannot be loaded: ModuleNotFoundError"),
        (f"{__name__}:Half", "has no reason, places_adapters, pick, explain"),
    ],
)
def test_one_that_cannot_be_made_is_a_configuration_error(install, value: str, text: str):
    install(last=value)
    with pytest.raises(ConfigInvalid, match=text):
        built("last")


@pytest.mark.parametrize("place", [RuntimeError("bug"), 3, -2, None, "0", True])
def test_where_it_fails_the_default_decides(install, caplog, place: Any):
    install(last=LAST)
    policy = built("last")
    assert isinstance(policy, PluginPolicy)
    policy._policy.place = place  # type: ignore[attr-defined]
    with caplog.at_level(logging.ERROR):
        assert {pick(policy) for _ in range(3)} <= {0, 1, 2}
    assert policy.reason.startswith("last failed (")
    assert policy.reason.endswith("lowest price")
    assert len(caplog.records) == 1, "once for each kind of fault"


def test_an_explanation_that_fails_is_empty(install):
    install(last=LAST)
    policy = built("last")
    policy._policy.place = RuntimeError("bug")  # type: ignore[attr-defined]
    assert policy.explain(make_request(), [make_endpoint(0), make_endpoint(1)], [0, 0]) == [{}, {}]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as a user installs it, but into a folder."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        f"{folder}/packages",
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "packages"


@pytest.fixture
def steady(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Policy]:
    monkeypatch.syspath_prepend(str(package))
    yield built("steady")
    sys.modules.pop("octavo_steady", None)


@pytest.mark.slow
def test_the_example_is_found_when_it_is_installed(steady: Policy):
    assert isinstance(steady, PluginPolicy)
    assert config(policy="steady").routing.policy == "steady"


@pytest.mark.slow
def test_the_example_gives_each_tenant_an_engine_that_keeps_up(steady: Policy):
    endpoints = [make_endpoint(i, max_num_seqs=4) for i in range(3)]
    chosen = {
        tenant: steady.pick(make_request(("a", 9), tenant=tenant), endpoints, [0, 0, 0])
        for tenant in map(str, range(20))
    }
    assert set(chosen.values()) == {0, 1, 2}
    again = steady.pick(make_request(("b", 9), tenant="7"), endpoints, [0, 0, 0])
    assert again == chosen["7"]
    assert steady.reason == "the tenant's own engine"
    longest = steady.pick(make_request(("b", 9), tenant="7"), endpoints, [600, 700, 800])
    assert (longest, steady.reason) == (2, "the longest cached prefix")
