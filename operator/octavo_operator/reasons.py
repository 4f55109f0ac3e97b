"""Every reason a condition can have: what it means and what to try. The table in docs/operator.md
is generated from this one, and each message ends with its fix."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Advice(NamedTuple):
    meaning: str
    fix: str


class Reason(StrEnum):
    """The closed set. Faults are in order of severity: the first one found is shown on Ready."""

    # the spec
    SPEC_INVALID = "SpecInvalid"
    UNSUPPORTED = "Unsupported"
    UNSUPPORTED_VERSION = "UnsupportedVersion"
    NAME_CONFLICT = "NameConflict"
    SERVED_NAME_CONFLICT = "ServedNameConflict"
    ADAPTER_NAME_CONFLICT = "AdapterNameConflict"
    DEPLOYMENT_NOT_FOUND = "DeploymentNotFound"
    LORA_DISABLED = "LoraDisabled"
    # the API server refuses what we apply, or a ReplicaSet's pods
    QUOTA_EXCEEDED = "QuotaExceeded"
    LIMIT_RANGE_VIOLATED = "LimitRangeViolated"
    WEBHOOK_DENIED = "WebhookDenied"
    WEBHOOK_UNAVAILABLE = "WebhookUnavailable"
    POD_SECURITY_VIOLATED = "PodSecurityViolated"
    SERVICE_ACCOUNT_MISSING = "ServiceAccountMissing"
    PRIORITY_CLASS_MISSING = "PriorityClassMissing"
    RUNTIME_CLASS_MISSING = "RuntimeClassMissing"
    OPERATOR_FORBIDDEN = "OperatorForbidden"
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    OBJECT_REFUSED = "ObjectRefused"
    # no place for the pod
    VOLUME_CLASS_MISSING = "StorageClassMissing"
    VOLUME_PENDING = "VolumePending"
    VOLUME_LOST = "VolumeLost"
    GPU_INSUFFICIENT = "InsufficientGPU"
    RESOURCES_INSUFFICIENT = "InsufficientResources"
    NO_MATCHING_NODE = "NoMatchingNode"
    UNSCHEDULABLE = "Unschedulable"
    SCHEDULING_GATED = "SchedulingGated"
    # the pod cannot start
    IMAGE_NOT_FOUND = "ImageNotFound"
    IMAGE_UNAUTHORIZED = "ImageUnauthorized"
    IMAGE_ARCHITECTURE = "ImageArchitecture"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    SECRET_MISSING = "SecretMissing"
    CONFIG_MAP_MISSING = "ConfigMapMissing"
    REFERENCE_KEY_MISSING = "ReferenceKeyMissing"
    SECURITY_CONTEXT_REFUSED = "SecurityContextRefused"
    MOUNT_FAILED = "MountFailed"
    NETWORK_SETUP_FAILED = "NetworkSetupFailed"
    CONTAINER_CANNOT_START = "ContainerCannotStart"
    # the model
    MODEL_UNAUTHORIZED = "ModelUnauthorized"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_REVISION_NOT_FOUND = "ModelRevisionNotFound"
    MODEL_DIGEST_MISMATCH = "ModelDigestMismatch"
    MODEL_DISK_FULL = "ModelDiskFull"
    MODEL_UNREACHABLE = "ModelUnreachable"
    MODEL_FETCH_FAILED = "ModelFetchFailed"
    MODEL_UNUSABLE = "ModelUnusable"
    # the engine
    OUT_OF_MEMORY = "OutOfMemory"
    ENGINE_SETTINGS_REFUSED = "EngineSettingsRefused"
    INSTRUCTION_SET = "InstructionSetMissing"
    CRASH_LOOP = "CrashLoop"
    STARTUP_PROBE_FAILING = "StartupProbeFailing"
    LIVENESS_PROBE_FAILING = "LivenessProbeFailing"
    READINESS_PROBE_FAILING = "ReadinessProbeFailing"
    # the node
    POD_EVICTED = "PodEvicted"
    POD_PREEMPTED = "PodPreempted"
    NODE_LOST = "NodeLost"
    NODE_REFUSED_POD = "NodeRefusedPod"
    # the way to the pod
    NOT_ROUTABLE = "NotRoutable"
    # adapters
    ADAPTER_NOT_LOADED = "AdapterNotLoaded"
    # the rollout
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    CANARY_REJECTED = "CanaryRejected"
    ADAPTER_ROLLED_BACK = "AdapterRolledBack"
    # not faults
    ACCEPTED = "Accepted"
    SUSPENDED = "Suspended"
    SCALED_TO_ZERO = "ScaledToZero"
    WAKING = "Waking"
    SERVING = "Serving"
    NO_REPLICA_READY = "NoReplicaReady"
    STARTING = "Starting"
    FETCHING_MODEL = "FetchingModel"
    LOADING_MODEL = "LoadingModel"
    MODEL_LOADED = "ModelLoaded"
    ROLLING_OUT = "RollingOut"
    CANARY_RUNNING = "CanaryRunning"
    ADAPTER_PROMOTED = "AdapterPromoted"
    SCALING = "Scaling"
    COMPLETE = "Complete"
    ADAPTER_LOADED = "AdapterLoaded"
    ADAPTER_LOADING = "AdapterLoading"
    ADAPTER_UNLOADED = "AdapterUnloaded"
    AS_EXPECTED = "AsExpected"
    FEWER_REPLICAS = "FewerReplicas"
    WAITING_FOR_DELETION = "WaitingForDeletion"


R = Reason
ADVICE: dict[Reason, Advice] = {
    R.SPEC_INVALID: Advice(
        "A field of the spec is invalid.", "Change the field that the message names."
    ),
    R.UNSUPPORTED: Advice(
        "The spec uses something that this version does not support.",
        "Remove the field, or use what the message suggests.",
    ),
    R.UNSUPPORTED_VERSION: Advice(
        "The resource has a field or value that this version of the operator does not support.",
        "Upgrade the operator, or remove the field.",
    ),
    R.NAME_CONFLICT: Advice(
        "An object with the name of a child exists and has another owner; it is left alone.",
        "Delete or rename that object, or rename the LLMDeployment.",
    ),
    R.SERVED_NAME_CONFLICT: Advice(
        "Another LLMDeployment, in any namespace, already uses the model name.",
        "Set another spec.model.servedName or alias in one of them.",
    ),
    R.ADAPTER_NAME_CONFLICT: Advice(
        "A model or another adapter already has the name.",
        "Set another spec.name in the LLMAdapter.",
    ),
    R.DEPLOYMENT_NOT_FOUND: Advice(
        "The LLMDeployment that an LLMAdapter names does not exist in its namespace.",
        "Correct spec.deployment, or create the LLMDeployment.",
    ),
    R.LORA_DISABLED: Advice(
        "The engines of the LLMDeployment take no adapters.",
        "Set spec.lora of the LLMDeployment; its pods are replaced once.",
    ),
    R.QUOTA_EXCEEDED: Advice(
        "The namespace's ResourceQuota does not allow it.",
        "Raise the quota, or lower replicas or resources.",
    ),
    R.LIMIT_RANGE_VIOLATED: Advice(
        "The namespace's LimitRange does not allow these resources.",
        "Bring spec.resources within the LimitRange.",
    ),
    R.WEBHOOK_DENIED: Advice(
        "An admission webhook or policy of the cluster refuses the object.",
        "Change what the policy names, or request an exception from its owner.",
    ),
    R.WEBHOOK_UNAVAILABLE: Advice(
        "An admission webhook of the cluster does not respond.",
        "Repair or remove that webhook; the operator retries.",
    ),
    R.POD_SECURITY_VIOLATED: Advice(
        "The namespace's Pod Security level refuses the pod.",
        "Remove the fields that are named from spec.podTemplate, or relax the namespace's level.",
    ),
    R.SERVICE_ACCOUNT_MISSING: Advice(
        "The pod's ServiceAccount does not exist.",
        "Create it, or remove serviceAccountName from spec.podTemplate.",
    ),
    R.PRIORITY_CLASS_MISSING: Advice(
        "The pod's PriorityClass does not exist.",
        "Create it, or correct priorityClassName in spec.podTemplate.",
    ),
    R.RUNTIME_CLASS_MISSING: Advice(
        "The pod's RuntimeClass does not exist.",
        "Create it, or correct runtimeClassName in spec.podTemplate.",
    ),
    R.OPERATOR_FORBIDDEN: Advice(
        "The operator lacks a permission that it needs.",
        "Apply the operator's Role of this version again.",
    ),
    R.NAMESPACE_TERMINATING: Advice(
        "The namespace is being deleted; nothing can be created in it.",
        "Nothing, or use another namespace.",
    ),
    R.OBJECT_REFUSED: Advice(
        "The API server refuses an object.", "Change the field that its message names."
    ),
    R.VOLUME_CLASS_MISSING: Advice(
        "The StorageClass of the cache does not exist.",
        "Correct spec.cache.storageClassName, or create the class.",
    ),
    R.VOLUME_PENDING: Advice(
        "A PersistentVolumeClaim has no volume yet.",
        "Check the claim's events, its StorageClass and its size.",
    ),
    R.VOLUME_LOST: Advice(
        "A PersistentVolumeClaim has lost its volume.",
        "Delete the claim, so that the model is fetched anew.",
    ),
    R.GPU_INSUFFICIENT: Advice(
        "No node has enough free GPUs.",
        "Add a node with GPUs, free some, or lower the number in spec.resources.limits.",
    ),
    R.RESOURCES_INSUFFICIENT: Advice(
        "No node has enough free CPU, memory or storage.",
        "Add a node, free resources, or lower spec.resources (for storage, spec.cache.size).",
    ),
    R.NO_MATCHING_NODE: Advice(
        "No node matches the pod's selector, affinity or tolerations.",
        "Correct nodeSelector, affinity or tolerations in spec.podTemplate.",
    ),
    R.UNSCHEDULABLE: Advice(
        "The scheduler finds no node for the pod.", "Change what the message names."
    ),
    R.SCHEDULING_GATED: Advice(
        "The pod waits in a queue, such as one of Kueue.",
        "Wait for quota, or read the queue's status (kubectl get workloads).",
    ),
    R.IMAGE_NOT_FOUND: Advice(
        "The image does not exist in its registry.", "Correct spec.engine.image, or push the image."
    ),
    R.IMAGE_UNAUTHORIZED: Advice(
        "The registry requires credentials for the image.",
        "Add imagePullSecrets to spec.podTemplate, or create the Secret that it names.",
    ),
    R.IMAGE_ARCHITECTURE: Advice(
        "The image is not built for the node's processor.",
        "Use an image for that architecture, or a nodeSelector for kubernetes.io/arch.",
    ),
    R.IMAGE_PULL_FAILED: Advice(
        "The image cannot be pulled.", "Check the image's name and the node's way to the registry."
    ),
    R.SECRET_MISSING: Advice(
        "A Secret that the pod refers to does not exist in its namespace.",
        "Create the Secret, or correct its name.",
    ),
    R.CONFIG_MAP_MISSING: Advice(
        "A ConfigMap that the pod refers to does not exist in its namespace.",
        "Create the ConfigMap, or correct its name.",
    ),
    R.REFERENCE_KEY_MISSING: Advice(
        "A Secret or ConfigMap lacks the key that the pod refers to.", "Add the key."
    ),
    R.SECURITY_CONTEXT_REFUSED: Advice(
        "The node refuses the container's security context.",
        "Use an image that runs as a non-root user, or correct securityContext.",
    ),
    R.MOUNT_FAILED: Advice(
        "A volume cannot be mounted.", "Check the volume that the message names."
    ),
    R.NETWORK_SETUP_FAILED: Advice(
        "The node cannot give the pod a network.", "Check the node's network plug-in."
    ),
    R.CONTAINER_CANNOT_START: Advice(
        "The container runtime cannot start the container.",
        "Check the image and command that the message names.",
    ),
    R.MODEL_UNAUTHORIZED: Advice(
        "The model's source refuses the credentials, or requires some.",
        "Put a valid token into the Secret that spec.model.secretRef names, and accept the "
        "model's licence at its source.",
    ),
    R.MODEL_NOT_FOUND: Advice("The model does not exist at its source.", "Correct spec.model.uri."),
    R.MODEL_REVISION_NOT_FOUND: Advice(
        "The model exists, its revision does not.", "Correct spec.model.revision."
    ),
    R.MODEL_DIGEST_MISMATCH: Advice(
        "The fetched files do not match spec.model.digest.",
        "Correct the digest if the change at the source is intended.",
    ),
    R.MODEL_DISK_FULL: Advice(
        "The model does not fit into the cache.", "Raise spec.cache.size above the model's size."
    ),
    R.MODEL_UNREACHABLE: Advice(
        "The model's source cannot be reached.",
        "Check DNS, proxy and NetworkPolicy; the fetch resumes automatically.",
    ),
    R.MODEL_FETCH_FAILED: Advice(
        "The model could not be fetched.", "Follow the message; the fetch is retried."
    ),
    R.MODEL_UNUSABLE: Advice(
        "The engine cannot use the model's files.",
        "Use a model whose architecture and format are supported, or a complete copy.",
    ),
    R.OUT_OF_MEMORY: Advice(
        "The engine needed more memory than its limit.",
        "Raise spec.resources.limits.memory, or lower maxModelLen, maxNumSeqs or the KV cache.",
    ),
    R.ENGINE_SETTINGS_REFUSED: Advice(
        "The engine refuses its settings.", "Correct the field of spec.engine that is named."
    ),
    R.INSTRUCTION_SET: Advice(
        "The engine used an instruction that the node's processor does not have.",
        "Choose newer nodes by a nodeSelector, or set OCTAVO_CPU_ISA.",
    ),
    R.CRASH_LOOP: Advice(
        "The engine exits repeatedly.",
        "Read the pod's previous log: kubectl logs --previous.",
    ),
    R.STARTUP_PROBE_FAILING: Advice(
        "The engine has not become healthy within its start-up time.",
        "Read the engine's log; a large model on a slow disk needs more time.",
    ),
    R.LIVENESS_PROBE_FAILING: Advice(
        "The engine makes no progress and is being restarted.", "Read the engine's previous log."
    ),
    R.READINESS_PROBE_FAILING: Advice(
        "The engine runs but is not ready for requests.", "Read the engine's log."
    ),
    R.POD_EVICTED: Advice(
        "The node evicted the pod.",
        "Set requests equal to limits, or free the resource that the message names.",
    ),
    R.POD_PREEMPTED: Advice(
        "A pod of higher priority preempted it.",
        "Give engines a priorityClassName, or add nodes.",
    ),
    R.NODE_LOST: Advice(
        "The node does not respond; its pods are being replaced.", "Repair or remove the node."
    ),
    R.NODE_REFUSED_POD: Advice(
        "The node refused the pod after it was scheduled.",
        "Usually nothing: it is replaced; check the node if it lasts.",
    ),
    R.NOT_ROUTABLE: Advice(
        "The engine is ready, but not every router sends it traffic.",
        "Check that the routers run, that NetworkPolicies let them reach the engine and the "
        "operator reach them, and that the operator has their state token (see its log).",
    ),
    R.ADAPTER_NOT_LOADED: Advice(
        "No engine could load the adapter.",
        "Correct spec.uri or the adapter's files, which the message names; it is tried again.",
    ),
    R.PROGRESS_DEADLINE_EXCEEDED: Advice(
        "The rollout made no progress for spec.rollout.progressDeadline.",
        "Follow condition Ready, or revert the change; the previous revision still serves.",
    ),
    R.CANARY_REJECTED: Advice(
        "The new revision performed worse than the stable one and was rolled back.",
        "Change the spec again; the rejected revision is not retried.",
    ),
    R.ADAPTER_ROLLED_BACK: Advice(
        "An adapter on trial performed worse than the one whose requests it shared; it gets none.",
        "Change its uri, or remove it; these files are not tried again while canary is there.",
    ),
    R.ACCEPTED: Advice("The spec is valid and its names are free.", ""),
    R.SUSPENDED: Advice("spec.suspend is set: no replica runs.", "Set spec.suspend to false."),
    R.SCALED_TO_ZERO: Advice(
        "No request has arrived for a while: the next one wakes the model.", ""
    ),
    R.WAKING: Advice("A request arrived while no replica ran; replicas are starting.", ""),
    R.SERVING: Advice("At least one replica is routable.", ""),
    R.NO_REPLICA_READY: Advice("No replica is routable.", ""),
    R.STARTING: Advice("Pods are being scheduled and started.", ""),
    R.FETCHING_MODEL: Advice("The model is being fetched.", ""),
    R.LOADING_MODEL: Advice("Engines are loading the model's weights.", ""),
    R.MODEL_LOADED: Advice("At least one engine has loaded the model.", ""),
    R.ROLLING_OUT: Advice("Replicas of a new revision replace those of an old one.", ""),
    R.CANARY_RUNNING: Advice(
        "A new revision receives part of the traffic and is being analysed.", ""
    ),
    R.ADAPTER_PROMOTED: Advice(
        "An adapter on trial was not worse than the other, and gets all requests of both.",
        "Give the other adapter its uri and remove it, when convenient.",
    ),
    R.SCALING: Advice("Replicas are starting or leaving.", ""),
    R.COMPLETE: Advice("All replicas have the current revision and are routable.", ""),
    R.ADAPTER_LOADED: Advice("At least one engine has loaded the adapter.", ""),
    R.ADAPTER_LOADING: Advice("An engine is loading the adapter.", ""),
    R.ADAPTER_UNLOADED: Advice(
        "No engine has the adapter now; a request for it makes one load it.", ""
    ),
    R.AS_EXPECTED: Advice("No problem was found.", ""),
    R.FEWER_REPLICAS: Advice("Fewer replicas serve than the spec requires.", ""),
    R.WAITING_FOR_DELETION: Advice(
        "Objects of a deleted LLMDeployment of the same name are still there.",
        "Nothing: Kubernetes deletes them; check their finalizers if it lasts.",
    ),
}


def explain(reason: Reason, fact: str) -> str:
    """One sentence of fact, one of advice; short enough for a condition."""
    fact = " ".join(fact.split()).rstrip(".")
    if len(fact) > 700:
        fact = fact[:699] + "…"
    fix = ADVICE[reason].fix
    return f"{fact}. {fix}" if fix else f"{fact}."
