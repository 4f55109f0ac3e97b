"""The engine's configuration file, one per revision: pods of two revisions never share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.endpoints import ENGINE_PORT
from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, REVISION_LABEL
from octavo_operator.desired.engine_options import Option, engine_options, to_toml
from octavo_operator.desired.metadata import child
from octavo_operator.desired.weights import weights
from octavo_operator.objects import names

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment

CONFIG_FILE = "engine.toml"


def config_map(deployment: LLMDeployment, revision: str) -> dict[str, Any]:
    name = names.config_map(deployment.name, revision, is_prefill=deployment.is_prefill)
    extra = {COMPONENT_LABEL: deployment.component, REVISION_LABEL: revision}
    return {
        **child(deployment, "v1", "ConfigMap", name, extra_labels=extra),
        "immutable": True,
        "data": {CONFIG_FILE: config_text(deployment)},
    }


def config_text(deployment: LLMDeployment) -> str:
    options = engine_options(deployment, model=weights(deployment, image="", pull_policy="").path)
    where: dict[str, Option] = {"host": "0.0.0.0", "port": ENGINE_PORT, "log-format": "json"}
    # A flag in engine.args wins over the file, and the file has the defaults too.
    return to_toml({**options, **where})
