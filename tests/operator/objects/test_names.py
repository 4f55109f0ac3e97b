"""Names of children: fit for every kind, stable, and never two owners' at once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_operator.objects import labels, names

DNS_1035 = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
OBJECT_NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", fullmatch=True)
ALL = (
    names.service,
    names.headless_service,
    names.service_account,
    names.cache_claim,
    names.disruption_budget,
    names.network_policy,
    names.monitor,
    names.autoscaler,
    lambda name: names.engine_deployment(name, "b" * 10),
    lambda name: names.config_map(name, "b" * 10),
)


def test_a_plain_name_stays_itself():
    assert names.service("smollm2") == "smollm2"
    assert names.headless_service("smollm2") == "smollm2-engines"
    assert names.engine_deployment("smollm2", "abc") == "smollm2-abc"
    assert names.cache_claim("smollm2") == "smollm2-weights"


def test_what_a_service_may_not_be_called_is_changed_and_marked():
    assert names.service("llama-3.1-8b") == "llama-3-1-8b-ntpj8l"
    assert names.service("3b").startswith("m-3b-")
    assert names.service("llama-3.1-8b") != names.service("llama-3-1-8b")


@pytest.mark.slow
@settings(derandomize=True, max_examples=100, deadline=None)
@given(OBJECT_NAMES)
def test_every_name_fits(name: str):
    for form in ALL:
        child = form(name)
        assert DNS_1035.fullmatch(child), child
        # Room for the ReplicaSet's hash and the pod's within a host name.
        assert len(child) <= 51


def test_long_names_do_not_meet():
    many = {names.base("a" * 50 + str(number)) for number in range(20_000)}
    assert len(many) == 20_000


def test_short_hashes_are_words_of_no_language():
    text = "".join(names.short_hash(str(number).encode(), 10) for number in range(100))
    assert not set(text) & set("aeiou013")


def test_selectors_are_written_in_order():
    assert labels.selector_text(labels.engines("a")) == (
        "app.kubernetes.io/component=engine,octavo.dev/deployment=a"
    )


@pytest.mark.parametrize("key", ["octavo.dev/anything", "app.kubernetes.io/managed-by"])
def test_keys_that_selection_rests_on_are_reserved(key: str):
    assert labels.is_reserved(key)
    assert not labels.is_reserved("team")
