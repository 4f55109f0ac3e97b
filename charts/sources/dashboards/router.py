"""What routers decide, and what becomes of it."""

from __future__ import annotations

from charts.sources.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from charts.sources.dashboards.promql import quantile, quantiles, rate
from octavo_engine.protocol import metric_names as n

_POOL = 'pool=~"$pool"'


def _rate(metric: str, by: str) -> Query:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Query(rate(metric, by, _POOL), legend)


def _endpoint(metric: str) -> Query:
    return Query(f"max by (pool, endpoint) ({metric}{{{_POOL}}})", "{{pool}} {{endpoint}}")


ROUTER = Dashboard(
    name="router",
    title="Router",
    description="Where requests go, why, and what the routers know of engines.",
    variables=(Variable("pool", "pool", n.ROUTER_REQUESTS_RUNNING),),
    rows=(
        Row(
            "Decisions",
            (
                Panel(
                    title="Picks by engine", queries=(_rate(n.ROUTER_PICKS, "pool, endpoint"),),
                    unit="reqps",
                ),
                Panel(title="Picks by policy", queries=(_rate(n.ROUTER_PICKS, "policy"),),
                      unit="reqps"),
                Panel(
                    title="Time to decide",
                    queries=quantiles(n.ROUTER_PICK_DURATION_SECONDS, "pool", _POOL), unit="s",
                ),
                Panel(
                    title="Prompt tokens: predicted and found in the cache",
                    queries=tuple(
                        Query(
                            f"{rate(metric, 'pool', _POOL)} / "
                            f"{rate(n.ROUTER_PREFIX_QUERIED_TOKENS, 'pool', _POOL)}",
                            f"{{{{pool}}}} {name}",
                        )
                        for metric, name in (
                            (n.ROUTER_PREFIX_PREDICTED_TOKENS, "predicted"),
                            (n.ROUTER_PREFIX_CACHED_TOKENS, "found"),
                        )
                    ),
                    unit="percentunit", width=12,
                    help="Apart: routers know too little (or too much) of what engines hold.",
                ),
                Panel(
                    title="Off by, in tokens",
                    queries=quantiles(n.ROUTER_PREFIX_PREDICTION_ERROR_TOKENS, "pool", _POOL),
                    width=12,
                ),
            ),
        ),
        Row(
            "Queues",
            (
                Panel(
                    title="Waiting for room",
                    queries=(
                        Query(f"sum by (pool) ({n.ROUTER_QUEUE_SIZE}{{{_POOL}}})", "{{pool}}"),
                    ),
                ),
                Panel(
                    title="Held until an engine comes",
                    queries=(
                        Query(f"sum by (pool) ({n.ROUTER_REQUESTS_HELD}{{{_POOL}}})", "{{pool}}"),
                    ),
                ),
                Panel(
                    title="Refused", queries=(_rate(n.ROUTER_REJECTIONS, "reason"),), unit="reqps",
                    kind="bars",
                ),
                Panel(
                    title="Tokens waiting",
                    queries=(
                        Query(f"sum by (pool) ({n.ROUTER_QUEUE_TOKENS}{{{_POOL}}})", "{{pool}}"),
                    ),
                ),
                Panel(
                    title="Time in the queue",
                    queries=quantiles(n.ROUTER_QUEUE_DURATION_SECONDS, "pool", _POOL), unit="s",
                ),
                Panel(
                    title="Clients gone", queries=(_rate(n.ROUTER_CLIENT_DISCONNECTS, "pool"),),
                    unit="reqps",
                ),
            ),
        ),
        Row(
            "Engines, as routers see them",
            (
                Panel(
                    title="Engines by state",
                    queries=(
                        Query(
                            f"sum by (state) (max by (pool, state) ({n.ROUTER_ENDPOINTS}"
                            f"{{{_POOL}}}))",
                            "{{state}}",
                        ),
                    ),
                    kind="bars",
                ),
                Panel(
                    title="Requests in flight",
                    queries=(
                        Query(
                            f"sum by (pool, endpoint) ({n.ROUTER_ENDPOINT_IN_FLIGHT}{{{_POOL}}})",
                            "{{pool}} {{endpoint}}",
                        ),
                    ),
                ),
                Panel(
                    title="KV cache in use",
                    queries=(_endpoint(n.ROUTER_ENDPOINT_KV_USAGE_PERC),), unit="percentunit",
                    most=1,
                ),
                Panel(
                    title="Running and waiting, as reported",
                    queries=(
                        _endpoint(n.ROUTER_ENDPOINT_RUNNING),
                        _endpoint(n.ROUTER_ENDPOINT_WAITING),
                    ),
                ),
                Panel(
                    title="Prompt tokens not yet computed",
                    queries=(
                        _endpoint(n.ROUTER_ENDPOINT_QUEUED_TOKENS),
                        _endpoint(n.ROUTER_ENDPOINT_PENDING_TOKENS),
                    ),
                    help="As reported, plus what was sent since.",
                ),
                Panel(
                    title="Age of their last report",
                    queries=(_endpoint(n.ROUTER_ENDPOINT_SIGNAL_AGE_SECONDS),), unit="s",
                ),
            ),
        ),
        Row(
            "Failures",
            (
                Panel(
                    title="Attempts by outcome",
                    queries=(_rate(n.ROUTER_UPSTREAM_ATTEMPTS, "outcome"),), unit="reqps",
                    kind="bars",
                ),
                Panel(
                    title="Attempts by engine",
                    queries=(_rate(n.ROUTER_UPSTREAM_REQUESTS, "endpoint, outcome"),),
                    unit="reqps",
                ),
                Panel(
                    title="Tried again",
                    queries=(
                        Query(rate(n.ROUTER_RETRIES, "pool", _POOL), "{{pool}} retried"),
                        Query(
                            rate(n.ROUTER_RETRIES_EXHAUSTED, "pool", _POOL),
                            "{{pool}} in vain",
                        ),
                        Query(rate(n.ROUTER_RESUMES, "pool, outcome", _POOL),
                              "{{pool}} continued: {{outcome}}"),
                    ),
                    unit="reqps",
                ),
                Panel(
                    title="LoRA adapters loaded and unloaded",
                    queries=(
                        Query(rate(n.ROUTER_ADAPTER_LOADS, "pool", _POOL), "{{pool}} loaded"),
                        Query(
                            rate(n.ROUTER_ADAPTER_LOAD_FAILURES, "pool", _POOL),
                            "{{pool}} failed",
                        ),
                        Query(rate(n.ROUTER_ADAPTER_UNLOADS, "pool", _POOL), "{{pool}} unloaded"),
                    ),
                    unit="ops",
                    help="Many of both: more adapters are requested than there are slots.",
                ),
                Panel(
                    title="Ejections", queries=(_rate(n.ROUTER_EJECTIONS, "pool"),), unit="ops",
                ),
                Panel(
                    title="Changes of state",
                    queries=(_rate(n.ROUTER_STATE_CHANGES, "pool, state"),), unit="ops",
                ),
                Panel(
                    title="Streams that broke",
                    queries=(
                        Query(rate(n.ROUTER_SIGNAL_BREAKS, "reason"), "{{reason}}"),
                        Query(rate(n.ROUTER_SIGNAL_CONNECTS, "outcome"), "connect: {{outcome}}"),
                    ),
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Process",
            (
                Panel(
                    title="Event loop late by",
                    queries=(
                        Query(
                            quantile(0.99, n.ROUTER_LOOP_LAG_SECONDS, "namespace, pod"),
                            "{{pod}} p99",
                        ),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Connections",
                    queries=(
                        Query(f"sum by (pod) ({n.ROUTER_CLIENT_CONNECTIONS})", "{{pod}} clients"),
                        Query(f"sum by (pod) ({n.ROUTER_UPSTREAM_CONNECTIONS})", "{{pod}} engines"),
                    ),
                ),
                Panel(
                    title="Residency index",
                    queries=(Query(f"sum by (pod) ({n.ROUTER_INDEX_MEMORY_BYTES})", "{{pod}}"),),
                    unit="bytes",
                ),
                Panel(
                    title="Route keys by engine", queries=(_endpoint(n.ROUTER_INDEX_KEYS),),
                ),
                Panel(
                    title="Discovery",
                    queries=(
                        Query(rate(n.ROUTER_DISCOVERY_UPDATES, "source"), "{{source}} changes"),
                        Query(rate(n.ROUTER_DISCOVERY_ERRORS, "source"), "{{source}} errors"),
                        Query(rate(n.ROUTER_DISCOVERY_RELISTS, "source"), "{{source}} read anew"),
                    ),
                    unit="ops",
                ),
                Panel(
                    title="Frames from engines",
                    queries=(
                        Query(rate(n.ROUTER_SIGNAL_FRAMES, "kind"), "{{kind}}"),
                        Query(rate(n.ROUTER_POLLS, "outcome"), "poll {{outcome}}"),
                    ),
                    unit="ops",
                ),
            ),
        ),
    ),
)  # fmt: skip
