"""The operator's settings."""

from __future__ import annotations

import pytest

from octavo_operator.errors import SettingsInvalid
from octavo_operator.settings import Images, OperatorSettings, RouterSettings


def test_clients_are_sent_to_the_router():
    assert RouterSettings().endpoint == "http://octavo-router.octavo-system.svc:8080/v1"
    assert RouterSettings(url="https://llm.example.com/v1").endpoint == "https://llm.example.com/v1"


def test_a_router_has_a_place():
    with pytest.raises(SettingsInvalid, match=r"router\.namespace must not be empty"):
        RouterSettings(namespace="")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"scheme": "ftp"}, "router.scheme must be http or https; got ftp"),
        ({"tls_ca": "ca.pem"}, "router.tls_ca needs router.scheme https"),
        ({"token": "two words"}, "router.token must be printable ASCII without spaces"),
        ({"token": "a\nb"}, "router.token must be printable ASCII without spaces"),
    ],
)
def test_router_settings_must_be_consistent(given, problem):
    with pytest.raises(SettingsInvalid, match=problem):
        RouterSettings(**given)


@pytest.mark.parametrize("name", ["Registry", "a b", "-a", "a" * 254, ""])
def test_a_pull_secret_has_the_name_of_a_secret(name):
    with pytest.raises(SettingsInvalid, match=r"images\.pull_secrets must be names of Secrets"):
        Images(pull_secrets=("fine", name))


def test_a_token_is_not_shown():
    assert "hunter2" not in repr(OperatorSettings(router=RouterSettings(token="hunter2")))


def test_capabilities_are_those_that_are_used():
    with pytest.raises(SettingsInvalid, match="apps/v1/Deployment, which is never used"):
        OperatorSettings(capabilities=frozenset(("apps/v1/Deployment",)))


def test_the_pause_before_stopping_fits_the_grace():
    with pytest.raises(SettingsInvalid, match="pre_stop_s must be from 0 to 15; got 16"):
        OperatorSettings(pre_stop_s=16)
