"""Values as people set them: each combination is rendered, checked and shown to an API server."""

from __future__ import annotations

from typing import Any

import yaml

from tests.fakes.chart import CHART, laid_over

DIGEST = "sha256:" + "ab" * 32
KEYS: dict[str, Any] = {"router": {"apiKeys": {"existingSecret": "api-keys"}}}
TLS: dict[str, Any] = {"router": {"tls": {"existingSecret": "router-tls"}}}
EPP: dict[str, Any] = {"router": {"epp": {"enabled": True}}}
POOLS: dict[str, Any] = laid_over(
    EPP, {"engines": {"clients": [{"namespaceSelector": {"matchLabels": {"a": "gateways"}}}]},
          "inferencePools": [{"name": "smollm2", "deployment": "smollm2"},
                             {"name": "other", "deployment": "b", "failureMode": "FailOpen"}]},
)  # fmt: skip
GATEWAY: dict[str, Any] = {
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "infra"}]}
}
MONITORED: dict[str, Any] = {
    "monitoring": {"podMonitor": True, "labels": {"release": "prometheus"}, "interval": "15s"},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Octavo"}},
    "alerts": {"enabled": True},
}
PLACED: dict[str, Any] = {
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In",
                                           "values": ["amd64", "arm64"]}]}
                ]
            }
        }
    },
    "podAnnotations": {"note": 'a "quoted": text'},
    "podLabels": {"team": "platform"},
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "more", "emptyDir": {"sizeLimit": "1Mi"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "resources": {"limits": {"cpu": "2"}},
    "serviceAccount": {"annotations": {"iam": "arn:aws:iam::1:role/a"}},
}  # fmt: skip

PRODUCTION: dict[str, Any] = yaml.safe_load((CHART / "values-production.yaml").read_text())
ISSUER: dict[str, Any] = {
    "certManager": {"issuer": {"name": "authority"}, "routerNames": ["llm.example.com"]},
    "operator": {"watchNamespaces": ["team-a", "team-b"]},
}
GENERATED: dict[str, Any] = {
    "generatedCertificates": {"enabled": True}, "operator": {"watchNamespaces": ["team-a"]},
}  # fmt: skip

COMBINATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one namespace": {"operator": {"watchNamespaces": ["octavo-system"]}},
    "two namespaces": {"operator": {"watchNamespaces": ["team-a", "team-b"]}},
    "keys": KEYS,
    "keys and their own token": laid_over(
        KEYS, {"router": {"stateToken": {"existingSecret": "state", "secretKey": "t"}}}
    ),
    "tls": TLS,
    "tls of a public authority": laid_over(TLS, {"router": {"tls": {"caKey": ""}}}),
    "keys and tls": laid_over(KEYS, TLS),
    "load balancer": laid_over(
        KEYS,
        {"router": {"service": {"type": "LoadBalancer", "port": 443, "annotations": {"lb": "nlb"},
                                "loadBalancerClass": "example.com/lb", "nodePort": 30443,
                                "loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
    ),
    "node port behind a proxy that asks": {
        "router": {"service": {"type": "NodePort"}, "allowUnauthenticated": True}
    },
    "ingress": laid_over(
        KEYS,
        {"ingress": {"enabled": True, "className": "nginx", "hosts": ["a.example", "b.example"],
                     "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
                     "tls": [{"hosts": ["a.example"], "secretName": "a-tls"}]}},
    ),
    "ingress for any host": laid_over(KEYS, {"ingress": {"enabled": True}}),
    "http route": laid_over(laid_over(KEYS, GATEWAY), {"httpRoute": {"hostnames": ["a.example"]}}),
    "endpoint picker": POOLS,
    "endpoint picker with tls": laid_over(POOLS, {"router": {"epp": {"tlsSecret": "epp-tls"}}}),
    "http route to a pool": laid_over(
        laid_over(laid_over(KEYS, GATEWAY), POOLS), {"httpRoute": {"inferencePool": "smollm2"}}
    ),
    "monitored": MONITORED,
    "service monitors": {
        "monitoring": {"serviceMonitor": True, "namespace": "prometheus",
                       "tlsConfig": {"insecureSkipVerify": True}},
        **TLS,
    },
    "scraped by annotations": {"monitoring": {"scrapeAnnotations": True}, **TLS},
    "dashboards elsewhere": {
        "dashboards": {"enabled": True, "namespace": "monitoring", "labels": {"mine": "yes"}},
        "alerts": {"enabled": True, "namespace": "monitoring", "labels": {"team": "llm"},
                   "disabled": ["OctavoRoutersAbsent"], "runbookURL": "https://wiki.example/octavo",
                   "slo": {"availability": 0.99, "ttftShare": 0.9, "ttftSeconds": 1}},
    },
    "autoscaled routers": {
        "router": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 20,
                                   "metrics": [{"type": "Resource", "resource": {"name": "memory",
                                    "target": {"type": "Utilization", "averageUtilization": 80}}}]}}
    },
    "without a disruption budget": {"router": {"podDisruptionBudget": {"enabled": False}}},
    "half may be away": {"router": {"podDisruptionBudget": {"maxUnavailable": "50%"}}},
    "air-gapped": {
        "global": {"imageRegistry": "registry.local:5000", "imagePullSecrets": [{"name": "reg"}]},
        "images": {"tag": "0.1.0-fips", "pullPolicy": "Always"},
        "router": {"image": {"digest": DIGEST}},
        "engines": {"cuda": {"image": {"repository": "mirror/engine-cuda", "tag": "1"}}},
    },
    "images each their own": {
        "images": {"registry": "registry.example.com"},
        "router": {"image": {"registry": "other.example.com", "tag": "2"}},
        "operator": {"image": {"digest": DIGEST}},
        "engines": {"cpu": {"image": {"registry": "cpu.example.com", "digest": DIGEST}}},
    },
    "placed": {"operator": PLACED, "router": PLACED},
    "spread otherwise": {
        "router": {"topologySpreadConstraints": [
            {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]}
    },
    "important": {"operator": {"priorityClassName": "system-cluster-critical"},
                  "router": {"priorityClassName": "system-cluster-critical"}},
    "no network policies": {"networkPolicy": {"enabled": False},
                            "engines": {"networkPolicy": False}},
    "tight network policies": {
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"llm": "yes"}}},
                        {"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "apiServerCIDRs": ["10.96.0.1/32", "172.18.0.2/32"], "apiServerPorts": [6443],
            "routerEgress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
                              "ports": [{"port": 8000, "protocol": "TCP"}]}],
        },
        "router": {"otlpEndpoint": "http://collector.monitoring:4318"},
    },
    "nobody gets in": {"networkPolicy": {"clients": []}},
    "traces over https": {"router": {"otlpEndpoint": "https://traces.example"}},
    "accounts of others": {
        "rbac": {"create": False, "aggregate": False},
        "operator": {"serviceAccount": {"create": False, "name": "theirs"}},
        "router": {"serviceAccount": {"create": False}},
    },
    "accounts by other names": {
        "operator": {"serviceAccount": {"name": "my-operator"}},
        "router": {"serviceAccount": {"name": "my-router"}},
    },
    "other names": {"nameOverride": "llm", "fullnameOverride": "serving",
                    "commonLabels": {"cost-centre": "42"}},
    "a router configuration": {
        "router": {
            "config": {
                "routing": {"policy": "least-load"}, "timeouts": {"first_token_s": 120},
                "server": {"access_log": "all"}, "flow": {"queue_timeout_s": 60},
                "discovery": {"upstreams": ["http://10.0.0.1:8000"]},
                "models": [{"name": "default", "alias_of": "smollm2"}],
            },
            "holdSeconds": 300, "drainSeconds": 30, "logLevel": "debug", "accessLog": "all",
            "extraArgs": ["--debug-endpoints"],
            "adminKey": {"existingSecret": "admin-key", "secretKey": "k"},
            "engineKey": {"existingSecret": "engine-key", "secretKey": "k"},
        }
    },
    "an operator's settings": {
        "operator": {"replicas": 1, "workers": 4, "resyncSeconds": 60, "writesPerSecond": 5,
                     "maxRollouts": 3,
                     "logLevel": "debug", "logFormat": "plain", "extraArgs": ["--port=8090"]},
        "engines": {"readinessGate": False},
    },
    "OpenShift": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    "a small cluster": {"router": {"replicas": 1, "resources": {"requests": {"cpu": "50m"}}}},
    "no test": {"test": {"enabled": False}},
    "a test with a key": laid_over(
        laid_over(KEYS, TLS), {"test": {"apiKeySecret": "client", "apiKeySecretKey": "k"}}
    ),
    "CRDs by somebody else": {"crds": {"install": False}},
    "production": PRODUCTION,
    "production with cert-manager": laid_over(PRODUCTION, ISSUER),
    "engines with more clients": laid_over(
        PRODUCTION, {"engines": {"tls": {"clientNames": ["spiffe://cluster/gateway"]}}}
    ),
    "engines of another authority": laid_over(
        TLS, {"engines": {"tls": {"secretName": "engine-tls"}},
              "router": {"engineTLS": {"existingSecret": "engine-ca", "caKey": "root.pem"}}},
    ),
    "everything": laid_over(
        laid_over(laid_over(laid_over(KEYS, TLS), POOLS), laid_over(GATEWAY, MONITORED)),
        {"router": {"autoscaling": {"enabled": True}}, "ingress": {"enabled": True}},
    ),
}  # fmt: skip
