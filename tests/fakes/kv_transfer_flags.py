"""How an engine is started that moves KV blocks to and from others."""

from __future__ import annotations

import json
from typing import Any


def transfer(role: str, **extra: Any) -> tuple[str, str]:
    """`extra`: of the connector, such as migration_s."""
    given = {
        "kv_connector": "OctavoConnector", "kv_role": role, "kv_port": 0,
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    return "--kv-transfer-config", json.dumps(given)
