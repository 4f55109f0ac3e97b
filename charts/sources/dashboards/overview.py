"""What clients get: requests, errors, first tokens, tokens, and whether there are engines."""

from __future__ import annotations

from charts.sources.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from charts.sources.dashboards.promql import quantile, quantiles, rate
from octavo_engine.protocol import metric_names as n

_POOL = 'pool=~"$pool"'

OVERVIEW = Dashboard(
    name="overview",
    title="Overview",
    description="What clients get, over all models. Start here.",
    variables=(Variable("pool", "pool", n.ROUTER_REQUESTS_RUNNING),),
    rows=(
        Row(
            "Now",
            (
                Panel(
                    title="Requests",
                    queries=(Query(f"sum(rate({n.ROUTER_REQUESTS}_total[RANGE]))"),),
                    unit="reqps", kind="stat", width=4,
                ),
                Panel(
                    title="Answered",
                    queries=(
                        Query(
                            f'1 - (sum(rate({n.ROUTER_REQUESTS}_total{{outcome="failed"}}[RANGE]))'
                            f" or vector(0)) / sum(rate({n.ROUTER_REQUESTS}_total[RANGE]))"
                        ),
                    ),
                    unit="percentunit", kind="stat", width=4,
                    help="Requests without an answer of 500 or above.",
                ),
                Panel(
                    title="Output tokens",
                    queries=(
                        Query(f'sum(rate({n.ROUTER_TOKENS}_total{{kind="output"}}[RANGE]))'),
                    ),
                    unit="tokens/s", kind="stat", width=4,
                ),
                Panel(
                    title="First token, p95",
                    queries=(
                        Query(quantile(0.95, n.ROUTER_TIME_TO_FIRST_TOKEN_SECONDS, "", _POOL)),
                    ),
                    unit="s", kind="stat", width=4,
                ),
                Panel(
                    title="Engines ready",
                    queries=(
                        Query(
                            "sum(max by (pool) "
                            f'({n.ROUTER_ENDPOINTS}{{state="ready", {_POOL}}}))'
                        ),
                    ),
                    kind="stat", width=4,
                ),
                Panel(
                    title="Prompt tokens from the cache",
                    queries=(
                        Query(
                            f"sum(rate({n.ROUTER_PREFIX_CACHED_TOKENS}_total{{{_POOL}}}[RANGE])) / "
                            f"sum(rate({n.ROUTER_PREFIX_QUERIED_TOKENS}_total{{{_POOL}}}[RANGE]))"
                        ),
                    ),
                    unit="percentunit", kind="stat", width=4,
                ),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    title="Requests by model",
                    queries=(Query(rate(n.ROUTER_REQUESTS, "model"), "{{model}}"),),
                    unit="reqps",
                ),
                Panel(
                    title="Answers by status",
                    queries=(Query(rate(n.ROUTER_REQUESTS, "code"), "{{code}}"),),
                    unit="reqps", kind="bars",
                    help="0: the client was gone before its answer began.",
                ),
                Panel(
                    title="Running and waiting",
                    queries=(
                        Query(
                            f"sum by (pool) ({n.ROUTER_REQUESTS_RUNNING}{{{_POOL}}})",
                            "{{pool}} running",
                        ),
                        Query(
                            f"sum by (pool) ({n.ROUTER_QUEUE_SIZE}{{{_POOL}}})", "{{pool}} waiting"
                        ),
                        Query(
                            f"sum by (pool) ({n.ROUTER_REQUESTS_HELD}{{{_POOL}}})",
                            "{{pool}} held until an engine comes",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel(
                    title="Time to first token",
                    queries=quantiles(n.ROUTER_TIME_TO_FIRST_TOKEN_SECONDS, "pool", _POOL),
                    unit="s",
                ),
                Panel(
                    title="Between tokens",
                    queries=quantiles(n.ROUTER_INTER_TOKEN_LATENCY_SECONDS, "pool", _POOL),
                    unit="s",
                ),
                Panel(
                    title="Whole request",
                    queries=quantiles(n.ROUTER_REQUEST_DURATION_SECONDS, "pool", _POOL),
                    unit="s",
                ),
                Panel(
                    title="Time in the queue",
                    queries=quantiles(n.ROUTER_QUEUE_DURATION_SECONDS, "pool", _POOL),
                    unit="s",
                    help="For room at an engine, or for an engine at all.",
                ),
                Panel(
                    title="Mean time of a token",
                    queries=quantiles(n.ROUTER_TIME_PER_OUTPUT_TOKEN_SECONDS, "pool", _POOL),
                    unit="s",
                    help="Of a request, after its first token.",
                ),
                Panel(
                    title="Tokens",
                    queries=(Query(rate(n.ROUTER_TOKENS, "kind"), "{{kind}}"),),
                    unit="tokens/s",
                    help="cached: prompt tokens that were not computed again.",
                ),
            ),
        ),
    ),
)  # fmt: skip
