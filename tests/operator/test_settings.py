"""The operator's settings."""

from __future__ import annotations

import pytest

from octavo_operator.errors import SettingsInvalid
from octavo_operator.settings import Router, Settings


def test_clients_are_sent_to_the_router():
    assert Router().endpoint == "http://octavo-router.octavo-system.svc:8080/v1"
    assert Router(url="https://llm.example.com/v1").endpoint == "https://llm.example.com/v1"


def test_a_router_has_a_place():
    with pytest.raises(SettingsInvalid, match=r"router\.namespace must not be empty"):
        Router(namespace="")


def test_capabilities_are_those_that_are_used():
    with pytest.raises(SettingsInvalid, match="apps/v1/Deployment, which is never used"):
        Settings(capabilities=frozenset(("apps/v1/Deployment",)))


def test_the_pause_before_stopping_fits_the_grace():
    with pytest.raises(SettingsInvalid, match="pre_stop_s must be from 0 to 15; got 16"):
        Settings(pre_stop_s=16)
