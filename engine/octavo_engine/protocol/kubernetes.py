"""Labels, annotations and conditions by which operator, router and engine pods find each other."""

GROUP = "octavo.dev"
VERSION = "v1alpha1"
PLURAL = "llmdeployments"
KIND = "LLMDeployment"
ADAPTER_PLURAL = "llmadapters"
ADAPTER_KIND = "LLMAdapter"

# on every object that the operator made, and on the pods
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "octavo-operator"
DEPLOYMENT_LABEL = "octavo.dev/deployment"  # the LLMDeployment's name
REVISION_LABEL = "octavo.dev/revision"  # hash of the pod template
COMPONENT_LABEL = "app.kubernetes.io/component"
ENGINE_COMPONENT = "engine"
PREFILL_COMPONENT = "prefill"  # engines that compute prompts for those of ENGINE_COMPONENT
WORKER_COMPONENT = "worker"  # pods that compute some layers for one of ENGINE_COMPONENT
ROUTER_COMPONENT = "router"
# On engine pods that the operator moves between both sides: which one they are on now. Without it a
# pod's component says so.
SIDE_LABEL = "octavo.dev/side"
PROMPTS_SIDE = "prefill"
ANSWERS_SIDE = "decode"

# On the LLMDeployment's Service: how a router shall serve it. JSON object (docs/router.md):
#   {"names": ["smollm2", ..], "policy": "prefix-load", "weights": {"<revision>": 90, ..},
#    "holdSeconds": 300, "port": 8000, "scaledToZero": false, "prefillFor": "",
#    "adapters": [{"name": "law", "uri": "/adapters/law", "pinned": true}, ..], "adapterSlots": 64}
# An adapter with "canary": {"of": "law", "percent": 10} gets that share of the requests for law.
ROUTING_ANNOTATION = "octavo.dev/routing"

# On an engine pod: it serves HTTPS, and this is the name in its certificate. Of the pod and not of
# the Service, since during a rollout some pods may serve HTTP yet.
TLS_NAME_ANNOTATION = "octavo.dev/tls-name"

# On a pod: true once every router replica sends it traffic.
ROUTABLE_CONDITION = "octavo.dev/Routable"
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
POD_UID_ENV = "OCTAVO_POD_UID"
POD_IP_ENV = "OCTAVO_POD_IP"  # where an engine is reached by others than routers
