"""The node's processes: their arguments as plain values, with the reason for each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from e2e.cluster import pause
from e2e.cluster.layout import (
    API_PORT,
    DNS_ADDRESS,
    NODE_ADDRESS,
    NODE_NAME,
    POD_NETWORK,
    SERVICE_NETWORK,
)

if TYPE_CHECKING:
    from e2e.cluster.layout import Layout

API = f"https://{NODE_ADDRESS}:{API_PORT}"
_ETCD, _ETCD_PEERS = "http://127.0.0.1:2379", "http://127.0.0.1:2380"


def containerd(layout: Layout) -> list[str]:
    return ["containerd", "--config", str(layout.root / "containerd.toml")]


def control_plane(layout: Layout) -> dict[str, list[str]]:
    pki, kubeconfig = layout.pki, f"--kubeconfig={layout.kubeconfig}"
    return {
        "etcd": [
            f"--data-dir={layout.root / 'etcd'}",
            "--unsafe-no-fsync",  # nothing is to survive this run
            "--log-level=warn",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            f"--listen-peer-urls={_ETCD_PEERS}",
        ],
        "kube-apiserver": [
            f"--etcd-servers={_ETCD}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={NODE_ADDRESS}",
            f"--secure-port={API_PORT}",
            f"--cert-dir={pki}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            # Logs and exec go to the node's address: nothing resolves its name.
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            f"--token-auth-file={layout.root / 'tokens.csv'}",
            "--allow-privileged=true",
        ],
        "kube-controller-manager": [
            kubeconfig,
            f"--service-account-private-key-file={pki / 'sa.key'}",
            f"--root-ca-file={pki / 'apiserver.crt'}",
            "--use-service-account-credentials",
            "--leader-elect=false",
            # Metrics come from no server here, hence slowly: autoscalers are to notice at once.
            "--horizontal-pod-autoscaler-sync-period=5s",
        ],
        "kube-scheduler": [kubeconfig, "--leader-elect=false"],
    }


def node(layout: Layout) -> dict[str, list[str]]:
    kubeconfig, name = f"--kubeconfig={layout.kubeconfig}", f"--hostname-override={NODE_NAME}"
    return {
        "kubelet": [
            kubeconfig,
            name,
            f"--config={layout.root / 'kubelet.yaml'}",
            f"--node-ip={NODE_ADDRESS}",
            f"--root-dir={layout.kubelet}",
        ],
        "kube-proxy": [
            kubeconfig,
            name,
            "--proxy-mode=iptables",
            f"--cluster-cidr={POD_NETWORK}",
            "--conntrack-max-per-core=0",  # the limit is the machine's, not the namespace's
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ],
    }


def files(layout: Layout, token: str) -> dict[str, str]:
    """By name within the run's folder."""
    return {
        "tokens.csv": f'{token},admin,admin,"system:masters"\n',
        "admin.conf": json.dumps(_kubeconfig(token)),
        "containerd.toml": _containerd_config(layout),
        "kubelet.yaml": json.dumps(_kubelet_config(layout)),
        "net.d/10-octavo.conflist": json.dumps(_pod_network()),
    }


def _kubeconfig(token: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": {"server": API, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "admin"}}],
    }


def _kubelet_config(layout: Layout) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.control_group}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "resolvConf": "",
        # The disk is the machine's: how full others made it must not end our pods.
        "evictionHard": {
            "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "enforceNodeAllocatable": [],
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "2s",
    }  # fmt: skip


def _pod_network() -> dict[str, object]:
    return {
        "cniVersion": "0.4.0",
        "name": "octavo",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods0",
                "isGateway": True,
                "ipMasq": True,
                "hairpinMode": True,  # a pod may be its own Service's endpoint
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": POD_NETWORK}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _containerd_config(layout: Layout) -> str:
    # restrict_oom_score_adj: to lower the score is refused in containers, and runc fails of it.
    return f"""version = 2
root = "{layout.containerd}/root"
state = "{layout.containerd}/state"
[grpc]
  address = "{layout.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause.IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{layout.network}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""
