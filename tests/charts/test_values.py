"""values.yaml: every setting is described, typed, and changes something; nothing else is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from charts.sources import __main__ as generator
from charts.sources import values_file
from charts.sources.values_file import Setting, ValuesInvalid
from tests.charts.combinations import COMBINATIONS, DIGEST, KEYS, MONITORED, TLS
from tests.fakes.chart import CHART, REGISTRY, Chart, RenderError, laid_over, nested

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = values_file.read(CHART / "values.yaml")
LEAVES = {setting.path: setting for setting in values_file.leaves(SETTINGS)}
GROUPS = [""]


def _collect(settings: tuple[Setting, ...]) -> None:
    for setting in settings:
        if setting.is_group:
            GROUPS.append(setting.path)
            _collect(setting.children)


_collect(SETTINGS)

EVERYTHING = COMBINATIONS["everything"]
# A value that differs from the default, where its type alone does not tell one.
OTHERS: dict[str, Any] = {
    "global.imagePullSecrets": [{"name": "registry"}],
    "operator.watchNamespaces": ["team-a"],
    "operator.extraEnv": [{"name": "A", "value": "b"}],
    "router.extraEnv": [{"name": "A", "value": "b"}],
    "operator.extraVolumes": [{"name": "a", "emptyDir": {}}],
    "router.extraVolumes": [{"name": "a", "emptyDir": {}}],
    "operator.extraVolumeMounts": [{"name": "a", "mountPath": "/a"}],
    "router.extraVolumeMounts": [{"name": "a", "mountPath": "/a"}],
    "operator.tolerations": [{"operator": "Exists"}],
    "router.tolerations": [{"operator": "Exists"}],
    "router.topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "router.autoscaling.metrics": [{"type": "Pods"}],
    "router.service.nodePort": 30000,
    "router.service.loadBalancerSourceRanges": ["10.0.0.0/8"],
    "router.autoscaling.maxReplicas": 11,
    "networkPolicy.clients": [{"podSelector": {}}],
    "networkPolicy.apiServerCIDRs": ["10.0.0.1/32"],
    "networkPolicy.apiServerPorts": [6444],
    "networkPolicy.routerEgress": [{"ports": [{"port": 1}]}],
    "ingress.tls": [{"secretName": "a"}],
    "httpRoute.parentRefs": [{"name": "other"}],
    "httpRoute.inferencePool": "smollm2",
    "inferencePools": [{"name": "smollm2", "deployment": "another"}],
    "alerts.disabled": ["OctavoNoEngines"],
    "alerts.slo.availability": 0.99,
    "alerts.slo.ttftShare": 0.5,
    "alerts.slo.ttftSeconds": 5.0,
    "certManager.duration": "720h",
    "router.image.digest": DIGEST,
    "operator.image.digest": DIGEST,
    "engines.cpu.image.digest": DIGEST,
    "engines.cuda.image.digest": DIGEST,
}
_BALANCED = laid_over(KEYS, nested("router.service.type", "LoadBalancer"))
_ENGINES = laid_over(TLS, nested("engines.tls.secretName", "engine-tls"))
_CLIENTS = laid_over(_ENGINES, nested("router.engineTLS.clientSecret", "client-tls"))
_GENERATED = laid_over(TLS, nested("operator.watchNamespaces", ["team-a"]))
_ISSUED = laid_over(TLS, nested("certManager.issuer.name", "authority"))
# Where a setting only counts together with another one.
NEEDS: dict[str, dict[str, Any]] = {
    "router.allowUnauthenticated": {"ingress": {"enabled": True}},
    "router.apiKeys.secretKey": KEYS,
    "router.tls.caKey": TLS,
    "router.adminPort": nested("router.adminKey.existingSecret", "a"),
    "router.adminKey.secretKey": nested("router.adminKey.existingSecret", "a"),
    "router.engineKey.secretKey": nested("router.engineKey.existingSecret", "a"),
    "router.engineTLS.existingSecret": _ENGINES,
    "router.engineTLS.caKey": laid_over(
        _ENGINES, nested("router.engineTLS.existingSecret", "authority")
    ),
    "engines.apiKey.secretKey": laid_over(
        nested("engines.apiKey.secretName", "a"), nested("router.engineKey.existingSecret", "a")
    ),
    "router.engineTLS.clientSecret": _ENGINES,
    "engines.tls.clientCertificates": _CLIENTS,
    "engines.tls.clientNames": laid_over(_CLIENTS, nested("engines.tls.clientCertificates", True)),
    "generatedCertificates.enabled": _GENERATED,
    "generatedCertificates.days": laid_over(
        _GENERATED, nested("generatedCertificates.enabled", True)
    ),
    "certManager.issuer.kind": _ISSUED,
    "certManager.routerNames": _ISSUED,
    "certManager.duration": _ISSUED,
    "router.service.nodePort": _BALANCED,
    "router.service.loadBalancerClass": _BALANCED,
    "router.service.loadBalancerSourceRanges": _BALANCED,
    "monitoring.serviceMonitor": {},
    "monitoring.podMonitor": {},
    "monitoring.tlsConfig": laid_over(MONITORED, TLS),
    "test.apiKeySecretKey": nested("test.apiKeySecret", "a"),
    "crds.install": {"crds": {"install": True}},
    "crds.keep": {"crds": {"install": True}},
    "rbac.aggregate": {},
    # everything else in sight, where another one would win
    "images.registry": {},
    "images.tag": {},
}
PLAIN = (
    "router.image.",
    "operator.image.",
    "engines.",
    "router.replicas",
)  # without what hides them


def _other(setting: Setting, base: dict[str, Any]) -> Any:
    if setting.path in OTHERS:
        return OTHERS[setting.path]
    default, schema = setting.default, setting.schema
    if isinstance(default, bool):
        found: Any = base
        for name in setting.path.split("."):
            found = found.get(name, default) if isinstance(found, dict) else default
        return not (found if isinstance(found, bool) else default)
    if choices := schema.get("enum"):
        return next(choice for choice in choices if choice != default)
    if isinstance(default, int):
        return default + 1
    if isinstance(default, list):
        return ["other"]
    if isinstance(default, dict):
        return {"other": "other"}
    return "other"


Outcome = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def outcome(chart: Chart) -> Outcome:
    """The rendered files, or the refusal; each values only once."""
    known: dict[str, object] = {}

    def render(values: dict[str, Any]) -> object:
        key = json.dumps(values)
        if key not in known:
            try:
                known[key] = files = chart.files(values)
                files.pop("octavo/templates/router/state-secret.yaml")  # random
            except RenderError as error:
                known[key] = str(error)
        return known[key]

    return render


@pytest.mark.parametrize("path", LEAVES)
def test_every_value_changes_something(outcome: Outcome, path: str):
    base = NEEDS.get(path, {} if path.startswith(PLAIN) else EVERYTHING)
    if not path.startswith("crds."):
        base = laid_over({"crds": {"install": False}}, base)
    other = laid_over(base, nested(path, _other(LEAVES[path], base)))
    is_used = outcome(base) != outcome(other)
    assert is_used


def test_every_value_says_what_it_is():
    for setting in LEAVES.values():
        assert setting.doc.endswith((".", ".`")) and setting.doc[0].isupper(), setting.path
        assert len(setting.doc) >= 10, setting.path


WRONG: dict[str, Any] = {"boolean": "yes", "integer": "1", "number": "1", "string": 7,
                         "array": "a", "object": "a"}  # fmt: skip


def test_every_value_of_a_wrong_type_is_refused_and_named(chart: Chart):
    """All at once: the schema names each of them."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    wrong: dict[str, Any] = {}
    for path, setting in LEAVES.items():
        kind = _schema_of(schema, path).get("type")
        value = {"not": "allowed"} if "enum" in setting.schema else WRONG.get(str(kind), True)
        wrong = laid_over(wrong, nested(path, value))
    with pytest.raises(RenderError) as refused:
        chart.files(wrong)
    pointers = {line.partition("'")[2].partition("'")[0] for line in str(refused.value).split("\n")}
    missing = [path for path in LEAVES if f"/{path.replace('.', '/')}" not in pointers]
    assert missing == []


def _schema_of(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


@pytest.mark.parametrize("group", GROUPS)
def test_unknown_values_are_refused(chart: Chart, group: str):
    """But in `global`, which a parent chart shares among its charts."""
    path = f"{group}.replicaCount" if group else "replicaCount"
    if group == "global":
        assert chart.files(nested(path, 1))
        return
    with pytest.raises(RenderError, match="'replicaCount' not allowed"):
        chart.files(nested(path, 1))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("router.image.digest", "sha256:12", "does not match pattern"),
        ("operator.watchNamespaces", ["Team A"], "does not match pattern"),
        ("operator.watchNamespaces", ["a", "a"], "items at 0 and 1 are equal"),
        ("router.service.port", 0, "minimum"),
        ("alerts.slo.availability", 1, "exclusiveMaximum|maximum"),
        ("alerts.slo.ttftSeconds", 3, "must be one of"),
        ("inferencePools", [{"name": "a"}], "missing property 'deployment'"),
        ("inferencePools", [{"name": "a", "deployment": "b", "port": 1}], "'port' not allowed"),
        ("commonLabels", {"a": 1}, "want string"),
    ],
)
def test_values_out_of_range_are_refused(chart: Chart, path: str, value: Any, said: str):
    with pytest.raises(RenderError, match=said):
        chart.files(nested(path, value))


def test_the_defaults_fit_their_own_schema(chart: Chart, defaults: dict[str, Any]):
    assert chart.files(laid_over(defaults, REGISTRY))


def test_everything_that_is_made_from_something_else_is_current(monkeypatch, capsys):
    monkeypatch.chdir(CHART.parents[1])
    assert generator.main(["--check"]) == 0, capsys.readouterr().out


def test_a_value_without_a_sentence_is_no_value(tmp_path: Path):
    (tmp_path / "values.yaml").write_text("a:\n  # -- Said.\n  b: 1\n  c: 2\n")
    with pytest.raises(ValuesInvalid, match=r"^a\.c: has no comment"):
        values_file.read(tmp_path / "values.yaml")
    (tmp_path / "values.yaml").write_text('# -- Said.\n# @schema {"a"\na: 1\n')
    with pytest.raises(ValuesInvalid, match=r"^a: @schema is no JSON"):
        values_file.read(tmp_path / "values.yaml")
