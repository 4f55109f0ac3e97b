"""The one place where a child's name is formed: a function of the LLMDeployment's name alone.

An LLMDeployment may be called `llama-3.1-8b`; a Service may not. A name that must be changed or cut
gets a hash of the original at its end, so that two LLMDeployments never share a child.
"""

from __future__ import annotations

import hashlib
import re

_LONGEST = 40  # leaves room for revision, ReplicaSet and pod suffixes within a host name's 63
_HASH_CHARS = 6
# As Kubernetes' own: no vowels, hence no words; nothing that looks like something else.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"

# NOTE: no revision ends so, for its lack of vowels: no other Deployment has the name.
_PREFILL = "-prefill"
_WORKER = "-worker"

ENGINE_CONTAINER = "engine"
FETCH_CONTAINER = "fetch"


def base(deployment_name: str) -> str:
    """A DNS-1035 label: starts with a letter, ends with no dash, no dots, at most 40 long."""
    plain = re.sub(r"[^a-z0-9-]", "-", deployment_name)
    if not plain[:1].isalpha():
        plain = "m-" + plain
    if plain == deployment_name and len(plain) <= _LONGEST:
        return plain
    kept = plain[: _LONGEST - _HASH_CHARS - 1].rstrip("-")
    return f"{kept}-{short_hash(deployment_name.encode(), _HASH_CHARS)}"


def service(deployment_name: str) -> str:
    return base(deployment_name)


def headless_service(deployment_name: str) -> str:
    return f"{base(deployment_name)}-engines"


def service_account(deployment_name: str) -> str:
    return base(deployment_name)


def engine_deployment(deployment_name: str, revision: str, *, is_prefill: bool = False) -> str:
    return f"{base(deployment_name)}-{revision}{_PREFILL if is_prefill else ''}"


def worker_deployment(deployment_name: str, revision: str, leader_uid: str, rank: int) -> str:
    return f"{group(deployment_name, revision, leader_uid)}-{rank}{_WORKER}"


def group(deployment_name: str, revision: str, leader_uid: str) -> str:
    """Of what all pods of one group share."""
    of_leader = short_hash(leader_uid.encode(), _HASH_CHARS)
    return f"{base(deployment_name)}-{revision}-{of_leader}"


def config_map(deployment_name: str, revision: str, *, is_prefill: bool = False) -> str:
    return engine_deployment(deployment_name, revision, is_prefill=is_prefill)


def answers(child_name: str) -> bool:
    """Whether the pods of a Deployment are those that answer."""
    return not child_name.endswith((_PREFILL, _WORKER))


def cache_claim(deployment_name: str) -> str:
    return f"{base(deployment_name)}-weights"


def disruption_budget(deployment_name: str) -> str:
    return base(deployment_name)


def network_policy(deployment_name: str) -> str:
    return base(deployment_name)


def monitor(deployment_name: str) -> str:
    return base(deployment_name)


def autoscaler(deployment_name: str) -> str:
    return base(deployment_name)


def short_hash(content: bytes, length: int) -> str:
    """Letters and digits that fit everywhere a name goes."""
    number = int.from_bytes(hashlib.sha256(content).digest(), "big")
    letters = []
    for _ in range(length):
        number, index = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[index])
    return "".join(letters)
