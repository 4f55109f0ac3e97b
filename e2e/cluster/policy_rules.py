"""NetworkPolicies as packet filter rules: a pure function of the API's objects.

Each pod that a policy selects gets a chain per direction that lets pass what some policy allows and
rejects the rest. Replies to what was let pass, and what the node itself sends, always pass.
"""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ENTRY = "OCTAVO-POLICIES"
_PREFIX = "OCTAVO-"
_ANY = "0.0.0.0/0"

Body = dict[str, Any]  # as the API gives it


@dataclass(frozen=True, slots=True)
class Pod:
    """What policies see of a pod."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    ports: Mapping[tuple[str, str], int]  # by name and protocol

    @classmethod
    def parse(cls, body: Body) -> Pod | None:
        """None where there is no address, or only the node's."""
        status, spec = body.get("status", {}), body["spec"]
        if not status.get("podIP") or spec.get("hostNetwork"):
            return None
        if status.get("phase") in ("Succeeded", "Failed"):  # its address may be another's already
            return None
        ports = {
            (port["name"], port.get("protocol", "TCP")): int(port["containerPort"])
            for container in spec["containers"]
            for port in container.get("ports", ())
            if "name" in port
        }
        metadata = body["metadata"]
        return cls(metadata["namespace"], metadata.get("labels", {}), status["podIP"], ports)


@dataclass(frozen=True, slots=True)
class World:
    """Who is there."""

    pods: Sequence[Pod]
    namespaces: Mapping[str, Mapping[str, str]]  # labels by name

    def select(self, peer: Body, namespace: str) -> list[Pod]:
        """Pods that a peer of a policy in `namespace` means."""
        if "namespaceSelector" in peer:
            chosen = {
                name
                for name, labels in self.namespaces.items()
                if matches(peer["namespaceSelector"], labels)
            }
        else:
            chosen = {namespace}
        selector = peer.get("podSelector", {})
        return [p for p in self.pods if p.namespace in chosen and matches(selector, p.labels)]


def rules(policies: Iterable[Body], world: World) -> str:
    """For iptables-restore --noflush: the whole of our chains, whatever was in them before."""
    policies = list(policies)
    entry = [f"-A {ENTRY} -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"]
    chains: dict[str, list[str]] = {}
    for direction, end in (("Egress", "-s"), ("Ingress", "-d")):
        for pod in sorted(world.pods, key=lambda pod: pod.address):
            own = [policy for policy in policies if _isolates(policy, pod, direction)]
            if not own:
                continue
            name = _PREFIX + hashlib.sha256(f"{direction}{pod.address}".encode()).hexdigest()[:16]
            entry.append(f"-A {ENTRY} {end} {pod.address} -j {name}")
            allowed = sorted(
                {rule for policy in own for rule in _allowed(policy, pod, direction, world)}
            )
            chains[name] = [f"-A {name} {rule} -j RETURN".replace("  ", " ") for rule in allowed]
            chains[name].append(f"-A {name} -j REJECT")
    lines = [f":{name} - [0:0]" for name in (ENTRY, *chains)]
    lines += entry
    for chain in chains.values():
        lines += chain
    return "\n".join(["*filter", *lines, "COMMIT", ""])


def matches(selector: Body, labels: Mapping[str, str]) -> bool:
    """A label selector; the empty one selects all."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    return all(_holds(term, labels) for term in selector.get("matchExpressions", ()))


def _holds(term: Body, labels: Mapping[str, str]) -> bool:
    key, values = term["key"], term.get("values", ())
    match term["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"operator {term['operator']} of a selector is unknown")


def _isolates(policy: Body, pod: Pod, direction: str) -> bool:
    spec = policy["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    is_here = policy["metadata"]["namespace"] == pod.namespace
    return is_here and direction in types and matches(spec.get("podSelector", {}), pod.labels)


def _allowed(policy: Body, pod: Pod, direction: str, world: World) -> Iterator[str]:
    """Conditions of packets, as iptables takes them."""
    peers_key, end = ("from", "-s") if direction == "Ingress" else ("to", "-d")
    for rule in policy["spec"].get(direction.lower(), ()) or ():
        ports = rule.get("ports") or [None]
        for network, other in _peers(rule.get(peers_key), policy, world):
            target = pod if direction == "Ingress" else other
            for port in ports:
                condition = "" if port is None else _port(port, target)
                if condition is not None:
                    yield f"{end} {network} {condition}".strip()


def _peers(
    peers: Sequence[Body] | None, policy: Body, world: World
) -> Iterator[tuple[str, Pod | None]]:
    if not peers:
        yield _ANY, None
    for peer in peers or ():
        if "ipBlock" in peer:
            for network in _without(peer["ipBlock"]):
                yield network, None
        else:
            for pod in world.select(peer, policy["metadata"]["namespace"]):
                yield pod.address, pod


def _without(block: Body) -> list[str]:
    """The block's networks less its exceptions; those of IPv6 match nothing here."""
    whole = ipaddress.ip_network(block["cidr"], strict=False)
    if not isinstance(whole, ipaddress.IPv4Network):
        return []
    left = [whole]
    for text in block.get("except", ()):
        hole = ipaddress.IPv4Network(text, strict=False)
        left = [
            part
            for network in left
            for part in (network.address_exclude(hole) if hole.subnet_of(network) else [network])
        ]
    return [str(network) for network in left]


def _port(port: Body, target: Pod | None) -> str | None:
    """None where a name means no port of the target."""
    protocol = port.get("protocol", "TCP")
    number = port.get("port")
    if number is None:
        return f"-p {protocol.lower()}"
    if isinstance(number, str):
        number = target.ports.get((number, protocol)) if target else None
        if number is None:
            return None
    last = f":{port['endPort']}" if "endPort" in port else ""
    return f"-p {protocol.lower()} --dport {number}{last}"
