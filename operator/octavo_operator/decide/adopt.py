"""What another version of the operator has made and what serves: it is adopted, not replaced.

A revision is the hash of the user's spec (desired/revision.py). Everything else of a pod
template is the operator's, and may differ from one version, or one setting, to the next: pods that
run keep the template they were made by, and the next revision gets the new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import REVISION_LABEL
from octavo_operator.decide.observed import component_of, condition_of
from octavo_operator.desired.deployment import REVISION_HASH_ANNOTATION, TEMPLATE_ANNOTATION
from octavo_operator.desired.pod import pod_template
from octavo_operator.desired.revision import revision_of
from octavo_operator.objects import kinds, names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_operator.decide.observed import Observed
    from octavo_operator.objects.kinds import Object
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment


def current_revision(
    deployment: LLMDeployment,
    settings: OperatorSettings,
    observed: Observed,
    status: Mapping[str, Any],
) -> str:
    """The name of the spec's revision: of an existing one under any name, else of the one to
    create."""
    wanted = revision_of(deployment, settings)
    if wanted in observed.engines:
        return wanted
    for name, body in observed.engines.items():
        if kinds.annotations_of(body).get(REVISION_HASH_ANNOTATION) == wanted:
            return name
    name = str(status.get("revision") or "")
    unmarked = observed.engines.get(name)
    if unmarked is None or _is_marked(unmarked) or not _is_of(status, deployment.generation):
        return wanted
    fresh = pod_template(deployment, settings, name)
    return name if _pulled(fresh) == _pulled(unmarked["spec"]["template"]) else wanted


def kept(desired: Sequence[Object], observed: Observed) -> list[Object]:
    """The desired objects, with what stays as it is: the file of a revision, which is immutable,
    and the template of one whose pods run. A template without running pods may be corrected."""
    return [_kept(body, observed) for body in desired]


def _kept(body: Object, observed: Observed) -> Object:
    kind, revision = kinds.kind_of(body), kinds.labels_of(body).get(REVISION_LABEL)
    found = observed.children.get((kind, kinds.name_of(body)))
    if found is None or not revision:
        return body
    if kind == kinds.CONFIG_MAP:
        return {**body, "data": found.get("data") or body["data"]}
    mark = kinds.annotations_of(found).get(TEMPLATE_ANNOTATION)
    if mark == kinds.annotations_of(body)[TEMPLATE_ANNOTATION]:
        return body
    pods = (
        pod
        for pod in observed.pods
        if kinds.labels_of(pod).get(REVISION_LABEL) == revision
        and component_of(pod) == component_of(body)
    )
    if not any(map(_runs, pods)):
        return body
    annotations = {**kinds.annotations_of(body), TEMPLATE_ANNOTATION: mark}
    if mark is None:
        del annotations[TEMPLATE_ANNOTATION]
    metadata = {**body["metadata"], "annotations": annotations}
    spec = {**body["spec"], "template": found["spec"]["template"]}
    return {**body, "metadata": metadata, "spec": spec}


def _is_marked(body: Object) -> bool:
    """By a version that names revisions by a hash of the spec."""
    return bool({REVISION_HASH_ANNOTATION, TEMPLATE_ANNOTATION} & kinds.annotations_of(body).keys())


def _is_of(status: Mapping[str, Any], generation: int) -> bool:
    """Whether the status speaks of the spec as it is, and that was accepted."""
    return any(
        condition.get("type") == "Accepted"
        and condition.get("status") == "True"
        and condition.get("observedGeneration") == generation
        for condition in status.get("conditions") or ()
    )


def _pulled(template: Object) -> tuple[str, list[Any]]:
    """What an administrator's settings decide of a template that an earlier version made."""
    spec = template["spec"]
    images = [c.get("image", "") for c in spec["containers"] if c["name"] == names.ENGINE_CONTAINER]
    return "".join(images), spec.get("imagePullSecrets") or []


def _runs(pod: Object) -> bool:
    """A container of it does, whichever: loading is worth keeping, failing to start is not."""
    status = pod.get("status") or {}
    parts = ("initContainerStatuses", "containerStatuses")
    states = [each.get("state") or {} for part in parts for each in status.get(part) or ()]
    return condition_of(pod, "ContainersReady") == "True" or any("running" in s for s in states)
