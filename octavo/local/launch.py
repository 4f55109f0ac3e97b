"""Arguments and environment of an engine process: from the same options as a pod's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.options import flags
from octavo_engine.config import HOST_MEMORY_FRACTION
from octavo_engine.errors import ConfigError
from octavo_operator.desired.engine_options import (
    Option,
    engine_options,
    extra_arguments,
    to_toml,
)
from octavo_operator.desired.probes import startup_budget_s
from octavo_operator.desired.weights import fetch_arguments, model_folder, weights
from octavo_operator.objects import names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from octavo.local.documents import References
    from octavo_operator.spec import EnvVar, LLMDeployment

_REVISION_CHARS = 10
_KEYS = "OCTAVO_API_KEY"
_KINDS = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}


@dataclass(frozen=True, slots=True)
class ThreadShare:
    """One replica's part of the machine."""

    num_threads: int
    replicas: int = 1  # among which memory is divided


@dataclass(frozen=True, slots=True)
class Launch:
    """One revision. Ports and threads are no part of it: they differ between its replicas."""

    revision: str
    options: Mapping[str, Option]
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()  # of `octavo fetch`, where the engine cannot do that itself
    fetch_variables: Mapping[str, str] = field(default_factory=dict)
    startup_s: float = 300.0
    drain_s: float = 120.0

    @property
    def keys(self) -> tuple[str, ...]:
        """That callers must send one of; none: everybody may call."""
        return tuple(key for key in self.variables.get(_KEYS, "").split(",") if key)

    def config_text(self, share: ThreadShare) -> str:
        """The engine's configuration file."""
        return to_toml({**_shared(self.options, share), "log-format": "text"})

    def command_arguments(self, config_file: Path, port: int) -> list[str]:
        """Of `octavo`. The address goes as flags: nothing may move it."""
        return [
            "serve", f"--config={config_file}", "--host=127.0.0.1", f"--port={port}",
            *self.arguments,
        ]  # fmt: skip


def launch_of(
    deployment: LLMDeployment,
    *,
    models: Path,
    references: References,
    environ: Mapping[str, str],
) -> Launch:
    """Raises ConfigError where a variable has no value here."""
    model = deployment.model
    fetch: tuple[str, ...] = ()
    options: dict[str, Option] = {}
    if deployment.device == "sim" or not model.is_fetched:
        path = weights(deployment, image="", pull_policy="").path
    elif model.scheme == "hf" and not model.digest:
        path = model.uri  # the engine uses the hub's own cache, as `octavo serve` always does
        if model.revision:
            options["revision"] = model.revision
    else:
        path = str(models / model_folder(model))
        fetch = tuple(fetch_arguments(model, path))
    folder = models.with_name("kv") / deployment.namespace / deployment.name
    shared = folder.with_name("shared") / deployment.engine.kv_tiers.shared_claim
    paths = {"kv_disk_path": str(folder), "kv_shared_path": str(shared)}
    options = {**engine_options(deployment, model=path, **paths), **options}
    if deployment.group is not None:
        options |= _of_all_pods(options, deployment.group.size)
    arguments = tuple(extra_arguments(deployment))
    variables = {
        each.name: value
        for each in deployment.engine.env
        if (value := _value_of(each, deployment, references, environ)) is not None
    }
    secret = references.get(("Secret", deployment.namespace, model.secret), {})
    content = json.dumps([options, arguments, variables, fetch, secret], sort_keys=True)
    if not fetch:
        variables = {**secret, **variables}  # the engine fetches: HF_TOKEN is for it
    return Launch(
        revision=names.short_hash(content.encode(), _REVISION_CHARS),
        options=options,
        arguments=arguments,
        variables=variables,
        fetch=fetch,
        fetch_variables=secret,
        startup_s=startup_budget_s(deployment),
        drain_s=deployment.rollout.drain_timeout_s,
    )


def engine_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """As a pod's: what this shell has for `octavo serve` must not reach every engine."""
    own = {flag.env for flag in (*flags.ENGINE_FLAGS, *flags.SERVER_FLAGS)} | {"OCTAVO_CONFIG"}
    kept = {
        name: value
        for name, value in environ.items()
        if name not in own and not name.startswith("OCTAVO_ROUTER_")
    }
    return kept | dict(variables)


def _shared(options: Mapping[str, Option], share: ThreadShare) -> dict[str, Option]:
    shared = dict(options)
    if options.get("device") not in ("cpu", "sim"):
        return shared
    wanted = options.get("num-threads")
    shared["num-threads"] = (
        min(wanted, share.num_threads) if isinstance(wanted, int) else share.num_threads
    )
    if "kv-cache-memory-bytes" not in options and share.replicas > 1:
        # Each would take the default share of the memory that is free when it starts.
        shared["memory-fraction"] = round(HOST_MEMORY_FRACTION / share.replicas, 4)
    return shared


def _of_all_pods(options: Mapping[str, Option], size: int) -> dict[str, Option]:
    """What the spec gives each pod of a group, for one engine with a process in place of each."""
    each = {name: options.get(name) for name in ("num-threads", "kv-cache-memory-bytes")}
    return {name: value * size for name, value in each.items() if isinstance(value, int)}


def _value_of(
    variable: EnvVar,
    deployment: LLMDeployment,
    references: References,
    environ: Mapping[str, str],
) -> str | None:
    if not variable.source:
        return variable.value
    kind = _KINDS[variable.source]
    found = references.get((kind, deployment.namespace, variable.source_name), {})
    value = found.get(variable.source_key, environ.get(variable.name))
    if value is None and not variable.optional:
        raise ConfigError(
            f"spec.engine.env of {deployment.pool}: {variable.name} comes from {kind} "
            f"{variable.source_name}, which is not in these files; add it, or export "
            f"{variable.name} before octavo up"
        )
    return value
