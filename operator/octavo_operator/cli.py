"""Flags and environment to settings, settings to a running operator.

Every flag is also a variable: --field-manager is OCTAVO_OPERATOR_FIELD_MANAGER. Flag > environment
> default. An unknown variable of that prefix is an error: a typo would be a silent default.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Any, Literal, get_args

from octavo_operator.errors import SettingsInvalid
from octavo_operator.settings import Images, OperatorSettings, RouterSettings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from octavo_operator.cluster.kube_config import KubeConfig
    from octavo_operator.process import RunSettings

PREFIX = "OCTAVO_OPERATOR_"
EXIT_SETTINGS = 2

# flag, default, help
_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("namespaces", "", "namespaces to serve, separated by commas; default: all"),
    ("kubeconfig", "", "file to log in with; default: the pod's own identity, then KUBECONFIG"),
    ("context", "", "context of the kubeconfig; default: its current one"),
    ("own-namespace", "", "namespace of the operator's Lease; default: the one it runs in"),
    ("deployment", "", "the operator's own Deployment, which its Lease is deleted with"),
    ("identity", "", "name of this replica; default: the host's"),
    ("host", "0.0.0.0", "address for health and metrics"),
    ("port", "8090", "port for health and metrics; 0: any free one"),
    ("leader-election", "true", "elect a leader; false only where no second replica can ever run"),
    ("workers", "8", "LLMDeployments reconciled at once"),
    ("resync", "300", "seconds between full comparisons with the API server"),
    ("max-rollouts", "10", "LLMDeployments that roll out at once; 0: no limit"),
    ("writes-per-second", "50", "maximum average rate of writes to the API server"),
    ("field-manager", "octavo-operator", "field manager of server-side apply"),
    ("cpu-image", "", "image of engines without a GPU whose spec names none; no default"),
    ("cuda-image", "", "image of engines with a GPU whose spec names none; no default"),
    ("pull-policy", "IfNotPresent", "Always, IfNotPresent or Never"),
    ("image-pull-secrets", "", "Secrets that engine pods pull with, unless their spec names some"),
    ("router-namespace", "octavo-system", "namespace of the routers"),
    ("router-service", "octavo-router", "Service of the routers"),
    ("router-url", "", "base URL that clients use; default: the routers' Service"),
    ("router-scheme", "http", "http or https: scheme of the routers' state endpoint"),
    ("router-tls-ca", "", "PEM file with the authority of routers' certificates; needs https"),
    ("router-token", "", "routers' state token, or a trusted key of theirs; best by environment"),
    (
        "readiness-gate",
        "true",
        "engine pods become Ready once all routers know them; false without routers",
    ),
    ("network-policy", "true", "restrict traffic to engines to routers and monitoring"),
    (
        "engine-clients",
        "",
        "more clients of engines, as JSON: a list of `from` entries of a NetworkPolicy",
    ),
    (
        "engine-tls-secret",
        "",
        "Secret in each LLMDeployment's namespace with tls.crt, tls.key and ca.crt: engines serve "
        "HTTPS, for the name NAME.NAMESPACE.svc; default: HTTP",
    ),
    (
        "engine-client-names",
        "",
        "DNS names or URIs of clients' certificates, separated by commas, which engines require, "
        "of the authority in ca.crt of that Secret; default: no certificate is required",
    ),
    (
        "engine-key-secret",
        "",
        "Secret in each LLMDeployment's namespace with the API key that its engines require, "
        "unless the spec sets OCTAVO_API_KEY",
    ),
    ("engine-key-name", "key", "key of that Secret"),
    ("engine-user", "65532", "user and group of engine pods; none: assigned by the cluster"),
    ("monitoring-namespace", "monitoring", "namespace whose pods may scrape engines"),
    ("monitor-labels", "", "labels of PodMonitors, as key=value,key=value"),
    ("log-format", "json", "json or plain"),
    ("log-level", "info", "debug, info, warning or error"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, default, text in _FLAGS:
        shown = f" (default: {default})" if default else ""
        parser.add_argument(f"--{name}", metavar="VALUE", help=f"{text}{shown}")


def run(args: argparse.Namespace, environment: Mapping[str, str] | None = None) -> int:
    """Until a signal. 0, or 2 where a setting cannot be."""
    try:
        values = read_values(args, os.environ if environment is None else environment)
        config, settings, run_settings = read_settings(values, os.environ)
        _set_up_logging(values)
        return _run(config, settings, run_settings)
    except SettingsInvalid as error:
        print(f"octavo operator: {error}", file=sys.stderr)  # noqa: T201  # a command line prints
        return EXIT_SETTINGS
    except OSError as error:
        print(f"octavo operator: cannot listen: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_SETTINGS


def read_values(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """One text per flag. Raises SettingsInvalid."""
    names = {name: PREFIX + name.upper().replace("-", "_") for name, _, _ in _FLAGS}
    for variable in environment:
        # A Service called octavo-operator puts its own variables into every pod.
        is_of_service = variable.startswith((f"{PREFIX}SERVICE_", f"{PREFIX}PORT_"))
        if variable.startswith(PREFIX) and variable not in names.values() and not is_of_service:
            raise SettingsInvalid(f"{variable} is set, and no flag has that name")
    values = {}
    for name, default, _ in _FLAGS:
        given = getattr(args, name.replace("-", "_"), None)
        inherited = environment.get(names[name])
        if name == "port" and inherited and inherited.startswith("tcp://"):
            inherited = None  # likewise
        values[name] = given if given is not None else inherited or default
    return values


def read_settings(
    values: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[KubeConfig, OperatorSettings, RunSettings]:
    """Raises SettingsInvalid."""
    from octavo_operator.cluster.kube_config import load
    from octavo_operator.cluster.leader import LeaseTimes
    from octavo_operator.process import RunSettings

    settings = OperatorSettings(
        field_manager=values["field-manager"],
        namespaces=_names(values["namespaces"]),
        images=Images(
            cpu=values["cpu-image"],
            cuda=values["cuda-image"],
            pull_policy=_pull_policy(values["pull-policy"]),
            pull_secrets=_names(values["image-pull-secrets"]),
        ),
        router=RouterSettings(
            namespace=values["router-namespace"],
            service=values["router-service"],
            url=values["router-url"],
            scheme=_scheme(values["router-scheme"]),
            token=values["router-token"].strip(),
            tls_ca=values["router-tls-ca"],
        ),
        max_rollouts=_number(values, "max-rollouts", 0, 10_000),
        readiness_gate=_flag(values, "readiness-gate"),
        network_policy=_flag(values, "network-policy"),
        engine_clients=_peers(values["engine-clients"]),
        engine_user=_user(values),
        engine_tls_secret=values["engine-tls-secret"],
        engine_client_names=_names(values["engine-client-names"]),
        engine_key_secret=values["engine-key-secret"],
        engine_key_name=values["engine-key-name"],
        monitoring_namespace=values["monitoring-namespace"],
        monitor_labels=_pairs(values["monitor-labels"], "monitor-labels"),
    )
    config = load(environment, values["kubeconfig"], values["context"])
    run_settings = RunSettings(
        namespace=values["own-namespace"] or config.namespace,
        deployment=values["deployment"],
        identity=values["identity"] or socket.gethostname(),
        host=values["host"],
        port=_number(values, "port", 0, 65535),
        num_workers=_number(values, "workers", 1, 256),
        resync_s=_number(values, "resync", 10, 86400),
        writes_per_s=_number(values, "writes-per-second", 1, 10_000),
        lease=LeaseTimes() if _flag(values, "leader-election") else None,
    )
    return config, settings, run_settings


def _run(config: KubeConfig, settings: OperatorSettings, run_settings: RunSettings) -> int:
    from octavo_operator.cluster.kube import KubeCluster
    from octavo_operator.process import Operator

    async def main() -> None:
        async with KubeCluster(config, field_manager=settings.field_manager) as cluster:
            await Operator(config, cluster, settings, run_settings).run()

    asyncio.run(main())
    return 0


def _set_up_logging(values: Mapping[str, str]) -> None:
    from octavo_common.logs import JsonFormatter, TextFormatter, utc_head, write_to_stderr

    if values["log-format"] not in ("json", "plain"):
        raise SettingsInvalid(f"--log-format must be json or plain; got {values['log-format']}")
    if values["log-level"] not in ("debug", "info", "warning", "error"):
        raise SettingsInvalid(
            f"--log-level must be debug, info, warning or error; got {values['log-level']}"
        )
    write_to_stderr(
        JsonFormatter(is_ascii=False, shows_none=True)
        if values["log-format"] == "json"
        else TextFormatter(utc_head, escapes=False, shows_none=True)
    )
    root = logging.getLogger()
    root.setLevel(values["log-level"].upper())
    # kopf logs each event of each object, and a CRD that was deleted as a page of tracebacks; that
    # its watches ended is logged once, by the code that starts them again.
    is_debug = values["log-level"] == "debug"
    logging.getLogger("kopf").setLevel(root.level if is_debug else logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _pull_policy(text: str) -> Literal["Always", "IfNotPresent", "Never"]:
    for policy in get_args(Literal["Always", "IfNotPresent", "Never"]):
        if text == policy:
            return policy  # type: ignore[no-any-return]  # one of the three
    raise SettingsInvalid(f"--pull-policy must be Always, IfNotPresent or Never; got {text}")


def _scheme(text: str) -> Literal["http", "https"]:
    for scheme in get_args(Literal["http", "https"]):
        if text == scheme:
            return scheme  # type: ignore[no-any-return]  # one of the two
    raise SettingsInvalid(f"--router-scheme must be http or https; got {text}")


def _flag(values: Mapping[str, str], name: str) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}
    value = known.get(values[name].lower())
    if value is None:
        raise SettingsInvalid(f"--{name} must be true or false; got {values[name]}")
    return value


def _number(values: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = values[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise SettingsInvalid(f"--{name} must be a whole number from {least} to {most}; got {text}")
    return int(text)


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(peer, dict) for peer in found):
        raise SettingsInvalid(f"--engine-clients must be a JSON list of objects; got {text[:80]}")
    return tuple(found)


def _user(values: Mapping[str, str]) -> int | None:
    return None if values["engine-user"] == "none" else _number(values, "engine-user", 1, 2**31 - 1)


def _pairs(text: str, name: str) -> dict[str, str]:
    pairs = {}
    for part in _names(text):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise SettingsInvalid(f"--{name} must be key=value,key=value; got {part}")
        pairs[key] = value
    return pairs
