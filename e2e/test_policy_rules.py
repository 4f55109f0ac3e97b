"""NetworkPolicies become exactly these rules; no cluster is needed to say so."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.cluster.policy_rules import ENTRY, Pod, World, matches, rules

WEB = Pod("shop", {"app": "web"}, "10.244.0.2", {("http", "TCP"): 8080})
DATABASE = Pod("shop", {"app": "database"}, "10.244.0.3", {})
PROBER = Pod("monitoring", {"app": "prober"}, "10.244.0.4", {})
WORLD = World([WEB, DATABASE, PROBER], {"shop": {}, "monitoring": {"team": "ops"}})


def policy(selected: dict[str, str], **spec: Any) -> dict[str, Any]:
    selector = {"podSelector": {"matchLabels": selected}}
    return {"metadata": {"namespace": "shop", "name": "p"}, "spec": {**selector, **spec}}


def chain_of(text: str, address: str, end: str) -> list[str] | None:
    """The conditions under which packets pass; None where all pass."""
    jumps = [line for line in text.splitlines() if line.startswith(f"-A {ENTRY} {end} {address} ")]
    if not jumps:
        return None
    name = jumps[0].rpartition(" ")[2]
    lines = [line for line in text.splitlines() if line.startswith(f"-A {name} ")]
    assert lines[-1] == f"-A {name} -j REJECT"
    return [line.removeprefix(f"-A {name} ").removesuffix(" -j RETURN") for line in lines[:-1]]


def test_without_policies_nothing_is_isolated() -> None:
    text = rules([], WORLD)
    assert chain_of(text, WEB.address, "-d") is None
    assert text.startswith("*filter\n") and text.endswith("COMMIT\n")


def test_a_policy_without_rules_lets_nothing_in_and_everything_out() -> None:
    text = rules([policy({"app": "web"})], WORLD)
    assert chain_of(text, WEB.address, "-d") == []
    assert chain_of(text, WEB.address, "-s") is None
    assert chain_of(text, DATABASE.address, "-d") is None


def test_an_empty_rule_lets_everything_in() -> None:
    text = rules([policy({"app": "web"}, ingress=[{}])], WORLD)
    assert chain_of(text, WEB.address, "-d") == ["-s 0.0.0.0/0"]


def test_named_ports_are_those_of_the_pod_that_listens() -> None:
    named = {"ports": [{"port": "http"}]}
    into = rules([policy({"app": "web"}, ingress=[named])], WORLD)
    assert chain_of(into, WEB.address, "-d") == ["-s 0.0.0.0/0 -p tcp --dport 8080"]
    everywhere = [{**named, "to": [{"podSelector": {}}]}]
    out = rules([policy({"app": "database"}, policyTypes=["Egress"], egress=everywhere)], WORLD)
    assert chain_of(out, DATABASE.address, "-s") == ["-d 10.244.0.2 -p tcp --dport 8080"]


def test_selectors_of_pods_stay_in_the_namespace_and_those_of_namespaces_leave_it() -> None:
    everyone: dict[str, Any] = {"podSelector": {}}
    operators = {"namespaceSelector": {"matchLabels": {"team": "ops"}}}
    text = rules([policy({"app": "web"}, ingress=[{"from": [everyone]}])], WORLD)
    assert chain_of(text, WEB.address, "-d") == ["-s 10.244.0.2", "-s 10.244.0.3"]
    text = rules([policy({"app": "web"}, ingress=[{"from": [operators]}])], WORLD)
    assert chain_of(text, WEB.address, "-d") == ["-s 10.244.0.4"]


def test_policies_of_one_pod_add_up() -> None:
    one = policy({"app": "web"}, ingress=[{"ports": [{"port": 1, "endPort": 9}]}])
    other = policy({}, ingress=[{"ports": [{"port": 53, "protocol": "UDP"}]}])
    assert chain_of(rules([one, other], WORLD), WEB.address, "-d") == [
        "-s 0.0.0.0/0 -p tcp --dport 1:9",
        "-s 0.0.0.0/0 -p udp --dport 53",
    ]


def test_exceptions_are_cut_out_of_a_block() -> None:
    block = {"cidr": "10.0.0.0/30", "except": ["10.0.0.2/32"]}
    spec = {"policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": block}]}]}
    text = rules([policy({"app": "web"}, **spec)], WORLD)
    assert chain_of(text, WEB.address, "-s") == ["-d 10.0.0.0/31", "-d 10.0.0.3/32"]


def test_pods_without_an_address_of_their_own_have_no_rules() -> None:
    body: dict[str, Any] = {"metadata": {"namespace": "shop"}, "spec": {"containers": []}}
    assert Pod.parse({**body, "status": {}}) is None
    ended = {"podIP": "10.244.0.9", "phase": "Succeeded"}
    assert Pod.parse({**body, "status": ended}) is None
    hosted = {**body, "spec": {"containers": [], "hostNetwork": True}}
    assert Pod.parse({**hosted, "status": {"podIP": "172.30.0.10"}}) is None


@pytest.mark.parametrize(
    ("term", "holds"),
    [
        ({"key": "app", "operator": "In", "values": ["web", "x"]}, True),
        ({"key": "app", "operator": "NotIn", "values": ["web"]}, False),
        ({"key": "tier", "operator": "NotIn", "values": ["web"]}, True),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "app", "operator": "DoesNotExist"}, False),
    ],
)
def test_expressions_of_selectors(term: dict[str, Any], holds: bool) -> None:
    assert matches({"matchExpressions": [term]}, {"app": "web"}) is holds
