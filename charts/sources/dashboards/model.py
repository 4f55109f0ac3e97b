"""One model: what its clients get, what its engines do for it, and which of them serve."""

from __future__ import annotations

from charts.sources.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from charts.sources.dashboards.promql import quantile, quantiles, rate
from octavo_engine.protocol import metric_names as n

_MODEL = 'model=~"$model"'  # as clients call it
_ENGINES = 'model_name=~"$model"'
_POOL = 'pool=~"$pool"'  # namespace/name of its LLMDeployment

_FAILED = (
    f'(sum(rate({n.ROUTER_REQUESTS}_total{{outcome="failed", {_MODEL}}}[RANGE])) or vector(0))'
)
_REQUESTS = f'sum(rate({n.ROUTER_REQUESTS}_total{{outcome!="gone", {_MODEL}}}[RANGE]))'
_CACHED = f"sum(rate({n.ROUTER_PREFIX_CACHED_TOKENS}_total{{{_POOL}}}[RANGE]))"
_QUERIED = f"sum(rate({n.ROUTER_PREFIX_QUERIED_TOKENS}_total{{{_POOL}}}[RANGE]))"


def _state(state: str) -> str:
    """Every router counts the same engines: the highest count is how many there are."""
    return f'max by (pool) ({n.ROUTER_ENDPOINTS}{{state="{state}", {_POOL}}})'


MODEL = Dashboard(
    name="model",
    title="Model",
    description="One LLMDeployment from its clients to its engines: choose model and pool.",
    variables=(
        Variable("model", "model", f"{n.ROUTER_TOKENS}_total", is_single=True),
        Variable("pool", "pool", n.ROUTER_REQUESTS_RUNNING, is_single=True),
    ),
    rows=(
        Row(
            "Now",
            (
                Panel(title="Requests", queries=(Query(_REQUESTS),), unit="reqps", kind="stat",
                      width=4),
                Panel(title="Failed", queries=(Query(f"{_FAILED} / {_REQUESTS}"),),
                      unit="percentunit", kind="stat", width=4,
                      help="Ended in a failure of ours, also within a stream."),
                Panel(
                    title="First token, p95",
                    queries=(
                        Query(quantile(0.95, n.ROUTER_TIME_TO_FIRST_TOKEN_SECONDS, "", _POOL)),
                    ),
                    unit="s", kind="stat", width=4,
                ),
                Panel(title="Output tokens", unit="tokens/s", kind="stat", width=4, queries=(
                    Query(f'sum(rate({n.ROUTER_TOKENS}_total{{kind="output", {_MODEL}}}[RANGE]))'),
                )),
                Panel(title="Prompt tokens from the cache", unit="percentunit", kind="stat",
                      width=4, queries=(Query(f"{_CACHED} / {_QUERIED}"),)),
                Panel(title="Routable engines", kind="stat", width=4,
                      queries=(Query(f"sum({_state('ready')})"),)),
            ),
        ),
        Row(
            "What clients get",
            (
                Panel(title="Requests by status", unit="reqps", kind="bars", queries=(
                    Query(rate(n.ROUTER_REQUESTS, "code", _MODEL), "{{code}}"),),
                    help="0: the client was gone before its answer began."),
                Panel(title="Requests by outcome", unit="reqps", kind="bars", queries=(
                    Query(rate(n.ROUTER_REQUESTS, "outcome", _MODEL), "{{outcome}}"),)),
                Panel(title="Refused", unit="reqps", kind="bars", queries=(
                    Query(rate(n.ROUTER_REJECTIONS, "reason", _POOL), "{{reason}}"),)),
                Panel(title="Time to first token", unit="s",
                      queries=quantiles(n.ROUTER_TIME_TO_FIRST_TOKEN_SECONDS, "pool", _POOL)),
                Panel(title="Between tokens", unit="s",
                      queries=quantiles(n.ROUTER_INTER_TOKEN_LATENCY_SECONDS, "pool", _POOL)),
                Panel(title="Whole request", unit="s",
                      queries=quantiles(n.ROUTER_REQUEST_DURATION_SECONDS, "pool", _POOL)),
            ),
        ),
        Row(
            "Tokens",
            (
                Panel(title="Tokens", unit="tokens/s", queries=(
                    Query(rate(n.ROUTER_TOKENS, "kind", _MODEL), "{{kind}}"),),
                    help="cached: prompt tokens that were not computed again."),
                Panel(title="Prompts by where their tokens came from", unit="tokens/s",
                      kind="bars", queries=(
                    Query(rate(n.PROMPT_TOKENS_BY_SOURCE, "source", _ENGINES), "{{source}}"),)),
                Panel(title="Found in the cache", unit="percentunit", most=1, queries=(
                    Query(f"{rate(n.PREFIX_CACHE_HITS, 'pod', _ENGINES)} / "
                          f"{rate(n.PREFIX_CACHE_QUERIES, 'pod', _ENGINES)}", "{{pod}}"),),
                    help="Share of prompt tokens, by engine."),
                Panel(title="Length of prompts",
                      queries=quantiles(n.REQUEST_PROMPT_TOKENS, "model_name", _ENGINES)),
                Panel(title="Length of answers",
                      queries=quantiles(n.REQUEST_GENERATION_TOKENS, "model_name", _ENGINES)),
                Panel(title="How answers ended", unit="ops", kind="bars", queries=(
                    Query(rate(n.REQUEST_SUCCESS, "finished_reason", _ENGINES),
                          "{{finished_reason}}"),)),
            ),
        ),
        Row(
            "Replicas and rollouts",
            (
                Panel(title="Running and routable", queries=(
                    Query(f"count by (model_name) ({n.NUM_REQUESTS_RUNNING}{{{_ENGINES}}})",
                          "{{model_name}} engines that run"),
                    Query(_state("ready"), "{{pool}} routable"),
                ), help="Apart: engines that load, drain, or are set aside."),
                Panel(title="Engines by state", kind="bars", queries=(
                    Query("sum by (state) (max by (pool, state) "
                          f"({n.ROUTER_ENDPOINTS}{{{_POOL}}}))", "{{state}}"),)),
                Panel(title="Pods that came and went", unit="ops", kind="bars", queries=(
                    Query(rate(n.ROUTER_STATE_CHANGES, "state", _POOL), "to {{state}}"),)),
                Panel(title="Running and waiting sequences", queries=(
                    Query(f"sum by (model_name) ({n.NUM_REQUESTS_RUNNING}{{{_ENGINES}}})",
                          "running"),
                    Query(f"sum by (model_name) ({n.NUM_REQUESTS_WAITING}{{{_ENGINES}}})",
                          "waiting"),
                    Query(f"sum by (pool) ({n.ROUTER_QUEUE_SIZE}{{{_POOL}}})",
                          "waiting in routers"),
                )),
                Panel(title="KV cache in use", unit="percentunit", most=1, queries=(
                    Query(f"{n.KV_CACHE_USAGE_PERC}{{{_ENGINES}}}", "{{pod}}"),)),
                Panel(title="Queue, p95", unit="s", queries=(
                    Query(quantile(0.95, n.ROUTER_QUEUE_DURATION_SECONDS, "pool", _POOL),
                          "{{pool}} routers"),
                    Query(quantile(0.95, n.REQUEST_QUEUE_TIME_SECONDS, "model_name", _ENGINES),
                          "{{model_name}} engines"),
                )),
                Panel(title="Loading took", unit="s", width=24, queries=(
                    Query(f"max by (pod) ({n.MODEL_LOAD_SECONDS}{{{_ENGINES}}})", "{{pod}}"),),
                    help="From start to ready: how long a new pod of a rollout takes."),
            ),
        ),
    ),
)  # fmt: skip
