"""From files, or the name of a model, to LLMDeployments: the YAML that a cluster takes."""

from __future__ import annotations

import base64
import binascii
import copy
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from octavo.models.catalogue import unknown_name
from octavo.models.references import with_local_files
from octavo.options.faults import all_faults
from octavo_common.faults import join_faults
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError, ModelError, NoSuchModel
from octavo_engine.protocol.kubernetes import ADAPTER_KIND, KIND
from octavo_engine.weights.demo import demo_model
from octavo_engine.weights.gguf_parts import without_number
from octavo_engine.weights.hub import parse_name
from octavo_operator.errors import SpecInvalid
from octavo_operator.spec import API_VERSION, LLMAdapter, LLMDeployment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_FILE_BYTES = 4 * 2**20
_SUFFIXES = (".yaml", ".yml", ".json")
_STAND_INS = {"spec.model": {"uri": "hf://org/name"}, "spec.model.uri": "hf://org/name"}

# (kind, namespace, name) of Secrets and ConfigMaps → their keys and values.
References = dict[tuple[str, str, str], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Documents:
    """All LLMDeployments of the files, with the objects that they refer to."""

    deployments: tuple[LLMDeployment, ...] = ()
    references: References = field(default_factory=dict)
    skipped: tuple[str, ...] = ()  # kinds that mean nothing outside of a cluster


def list_files(paths: Sequence[str]) -> list[Path]:
    """Files as given; of a folder those that look like YAML. Raises ConfigError."""
    files: list[Path] = []
    for text in paths:
        path = Path(text).expanduser()
        if not os.path.isdir(path):  # a Path's own raises where it may not look
            files.append(path)
            continue
        try:
            found = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None
        if not found:
            raise ConfigError(f"{path} has no file that ends in {', '.join(_SUFFIXES)}")
        files += found
    return files


def read_documents(texts: Mapping[str, str]) -> Documents:
    """`texts`: what each file holds, by its name. Raises ConfigError, and then nothing of it
    counts: half an edit must not take a model away."""
    deployments: dict[str, LLMDeployment] = {}
    references: References = {}
    skipped: set[str] = set()
    adapters: list[LLMAdapter] = []
    for name, text in texts.items():
        for number, body in enumerate(_load(name, text), start=1):
            where = f"{name}, document {number}"
            if body is None:
                continue
            kind = body.get("kind") if isinstance(body, dict) else None
            if kind in ("Secret", "ConfigMap"):
                _keep_reference(references, body, where)
                continue
            if kind == ADAPTER_KIND and body.get("apiVersion") == API_VERSION:
                _keep_adapter(adapters, body, where)
                continue
            if isinstance(kind, str) and kind != KIND and body.get("apiVersion") != API_VERSION:
                skipped.add(kind)
                continue
            deployment = parse(body, where)
            if deployment.pool in deployments:
                raise ConfigError(f"{where}: LLMDeployment {deployment.pool} is there twice")
            deployments[deployment.pool] = deployment
    if not deployments:
        raise ConfigError(f"{', '.join(texts)}: no LLMDeployment is in it; octavo down ends all")
    found = _with_adapters(deployments, adapters)
    return Documents(tuple(found), references, tuple(sorted(skipped)))


def parse(body: object, where: str) -> LLMDeployment:
    """Raises ConfigError that names the file and each field that cannot be."""
    try:
        return _parse(body)
    except SpecInvalid:
        raise ConfigError(f"{where}: {join_faults(_faults_of(body))}") from None


def _parse(body: object) -> LLMDeployment:
    deployment = LLMDeployment.parse(body)  # type: ignore[arg-type]  # it refuses what is none
    _check_local(deployment)
    return deployment


def _faults_of(body: object) -> list[str]:
    """All faults, as an API server would report them. One that may be of our making ends the
    search: what it names may be a whole object."""
    rest, fields = copy.deepcopy(body), list[str]()

    def is_ours(error: SpecInvalid) -> bool:
        return any(
            re.search(rf"{re.escape(field)}\b", str(error))
            or f"{field}.".startswith(f"{error.field}.")
            for field in fields
        )

    def leave_out(error: SpecInvalid) -> bool:
        if is_ours(error):
            return False
        fields.append(error.field)
        was_there = _leave_out(rest, error.field)
        return _stand_in(rest, error.field) or was_there

    return all_faults(SpecInvalid, lambda: _parse(rest), is_ours, leave_out)


def _leave_out(body: Any, path: str) -> bool:
    """Whether the field was there."""
    *parents, last = path.split(".")
    for name in parents:
        body = body.get(name) if isinstance(body, dict) else None
    if not isinstance(body, dict) or last not in body:
        return False
    del body[last]
    return True


def _stand_in(body: Any, path: str) -> bool:
    """Gives a required field that is missing, or wrong, a value that no other field contradicts,
    so that the search goes on. Whether it is such a field."""
    *parents, last = path.split(".")
    if (value := _STAND_INS.get(path)) is None:
        return False
    for name in parents:
        body = body.get(name) if isinstance(body, dict) else None
    if not isinstance(body, dict):
        return False
    body[last] = copy.deepcopy(value)
    return True


def deployment_of_model(model: str, *, replicas: int, device: str) -> LLMDeployment:
    """The LLMDeployment of `octavo up MODEL`. Raises ConfigError."""
    uri = _uri_of(model)
    named = uri if Path(model).expanduser().exists() else model
    last = without_number(named.rstrip("/").rpartition("/")[2].partition("@")[0])
    name = re.sub(r"[^a-z0-9.-]+", "-", last.lower().removesuffix(".gguf"))[:40].strip("-.")
    spec = {
        "model": {"uri": uri, "servedName": name or "model"},
        "engine": {"device": device},
        "replicas": replicas,
    }
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name or "model"},
        "spec": spec,
    }
    return parse(body, model)


def _uri_of(given: str) -> str:
    """Short names and pulled models mean what they mean to `octavo serve`."""
    model = with_local_files(EngineConfig(model=given)).model
    if model.startswith("hf://"):
        return _hub_uri(model.removeprefix("hf://"))
    if "://" in model:
        return model
    path = Path(model).expanduser()
    if path.exists():
        return f"file://{path.absolute()}"
    if re.fullmatch(r"[\w.-]+/[\w.@/-]+", model):
        return _hub_uri(model)
    raise ConfigError(f"{unknown_name(model)} a file or folder here nor ORG/NAME")


def _hub_uri(reference: str) -> str:
    """As the spec writes it: the revision before the file."""
    try:
        repo, file, revision = parse_name(reference)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    return f"hf://{repo}" + (f"@{revision}" if revision else "") + (f"/{file}" if file else "")


def _load(name: str, text: str) -> list[Any]:
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{name}{at}: is not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None


def _check_local(deployment: LLMDeployment) -> None:
    """What only a cluster has."""
    model = deployment.model
    if model.scheme == "pvc":
        raise SpecInvalid(
            "spec.model.uri",
            f"{model.uri} is a volume of a cluster; on this machine name the folder: file:///PATH",
            reason="Unsupported",
        )
    if model.scheme == "demo":
        try:
            demo_model(model.uri.removeprefix("demo://"))
        except NoSuchModel as error:
            raise SpecInvalid("spec.model.uri", str(error), reason="Unsupported") from None
    if deployment.engine.encryption_secret:
        raise SpecInvalid(
            "spec.engine.encryption",
            "reads a Secret as a volume of a pod; on this machine leave it out, and name a key "
            "file in spec.engine.args.encryption-key-file: docs/encryption.md",
            reason="Unsupported",
        )
    if deployment.prefill is not None:
        raise SpecInvalid(
            "spec.prefill",
            "has no use on one machine, where prompts and answers share the cores; leave it out, "
            "or start the two engines yourself: docs/prefill-decode.md",
            reason="Unsupported",
        )


def _keep_adapter(adapters: list[LLMAdapter], body: Mapping[str, Any], where: str) -> None:
    try:
        adapter = LLMAdapter.parse(body)
    except SpecInvalid as error:
        raise ConfigError(f"{where}: {error}") from None
    if any((one.namespace, one.name) == (adapter.namespace, adapter.name) for one in adapters):
        raise ConfigError(f"{where}: LLMAdapter {adapter.name} is there twice")
    adapters.append(adapter)


def _with_adapters(
    deployments: Mapping[str, LLMDeployment], adapters: Sequence[LLMAdapter]
) -> list[LLMDeployment]:
    """Each LLMDeployment with the adapters of its LLMAdapters too. Raises ConfigError."""
    taken = {name: one for one in deployments.values() for name in one.names}
    found = dict(deployments)
    for one in adapters:
        where, pool = f"LLMAdapter {one.name}", f"{one.namespace}/{one.deployment}"
        deployment = found.get(pool)
        if deployment is None:
            raise ConfigError(f"{where}: there is no LLMDeployment {pool} in these files")
        if deployment.room_for_adapters is None:
            raise ConfigError(
                f"{where}: the engines of LLMDeployment {one.deployment} take no adapters; add "
                "spec.lora to it"
            )
        if (owner := taken.get(one.adapter.name)) is not None:
            raise ConfigError(
                f"{where}: the name {one.adapter.name} already belongs to LLMDeployment "
                f"{owner.name}"
            )
        taken[one.adapter.name] = deployment
        found[pool] = replace(deployment, adapters=(*deployment.adapters, one.adapter))
    return list(found.values())


def _keep_reference(references: References, body: Mapping[str, Any], where: str) -> None:
    metadata = body.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    data, plain = body.get("data") or {}, body.get("stringData") or {}
    if not isinstance(name, str) or not isinstance(data, dict) or not isinstance(plain, dict):
        raise ConfigError(f"{where}: {body['kind']} needs metadata.name, and data as an object")
    assert isinstance(metadata, dict)
    values = {str(key): str(value) for key, value in data.items()}
    if body["kind"] == "Secret":
        try:
            values = {
                key: base64.b64decode(value, validate=True).decode()
                for key, value in values.items()
            }
        except (binascii.Error, UnicodeDecodeError):
            raise ConfigError(
                f"{where}: data of Secret {name} is not base64; use stringData for plain text"
            ) from None
    values.update({str(key): str(value) for key, value in plain.items()})
    namespace = metadata.get("namespace") or "default"
    references[body["kind"], str(namespace), name] = values
