"""Who uses what, and what it costs: tokens by tenant and model, engine hours, and a price for them.

Prices are fields on top of the dashboard: what an engine costs in an hour, in any currency.
"""

from __future__ import annotations

from charts.sources.dashboards.grafana import Dashboard, Field, Panel, Query, Row, Variable
from charts.sources.dashboards.promql import rate
from octavo_engine.protocol import metric_names as n

_TENANT = 'tenant=~"$tenant"'
_MODEL = 'model=~"$model"'
_ENGINES = 'model_name=~"$model"'
_ENGINES_NOW = f"count by (model_name) ({n.NUM_REQUESTS_RUNNING}{{{_ENGINES}}})"
# A sum over the points of a graph, each as long as their distance: engines that come and go count
# for the time that they were there.
_ENGINE_HOURS = (
    f"sum_over_time((count({n.NUM_REQUESTS_RUNNING}{{{_ENGINES}}}))[$__range:$__interval])"
    " * $__interval_ms / 3600000"
)


def _increase(metric: str, by: str, where: str) -> str:
    """Over the whole time that the dashboard shows."""
    return f"sum by ({by}) (increase({metric}_total{{{where}}}[$__range]))"


def _all(metric: str, where: str) -> str:
    return f"sum(increase({metric}_total{{{where}}}[$__range]))"


def _by_tenant(kind: str) -> Query:
    where = f'kind="{kind}", {_TENANT}'
    return Query(_increase(n.ROUTER_TENANT_TOKENS, "tenant", where), "{{tenant}}")


def _by_model(kind: str) -> Query:
    return Query(_increase(n.ROUTER_TOKENS, "model", f'kind="{kind}", {_MODEL}'), "{{model}}")


COST = Dashboard(
    name="cost",
    title="Cost and tokens",
    description="What each model and tenant used, and what it cost at the price of an engine-hour "
    "given above. Tenants are those of the routers' API keys.",
    variables=(
        Variable("model", "model", f"{n.ROUTER_TOKENS}_total"),
        Variable("tenant", "tenant", f"{n.ROUTER_TENANT_REQUESTS}_total"),
        Field("price", "Price of an engine-hour", "1.00"),
    ),
    rows=(
        Row(
            "In the time shown",
            (
                Panel(title="Engine-hours", unit="h", kind="stat", width=6,
                      queries=(Query(_ENGINE_HOURS),)),
                Panel(title="Cost", kind="stat", width=6,
                      queries=(Query(f"{_ENGINE_HOURS} * $price"),),
                      help="Engine-hours at the price above."),
                Panel(title="A million output tokens", kind="stat", width=6,
                      queries=(
                    Query(f"{_ENGINE_HOURS} * $price * 1e6 / "
                          f"{_all(n.GENERATION_TOKENS, _ENGINES)}"),),
                    help="All of the cost on what was generated."),
                Panel(title="Saved by the cache", unit="percentunit", kind="stat", width=6,
                      queries=(
                    Query(f"{_all(n.PROMPT_TOKENS_CACHED, _ENGINES)} / "
                          f"{_all(n.PROMPT_TOKENS, _ENGINES)}"),),
                    help="Share of prompt tokens that came from the cache."),
                Panel(title="Prompt tokens by model", kind="stat", queries=(_by_model("prompt"),)),
                Panel(title="Of them cached", kind="stat", queries=(_by_model("cached"),)),
                Panel(title="Output tokens by model", kind="stat", queries=(_by_model("output"),)),
            ),
        ),
        Row(
            "Models",
            (
                Panel(title="Tokens", unit="tokens/s", queries=(
                    Query(rate(n.ROUTER_TOKENS, "model, kind", _MODEL), "{{model}} {{kind}}"),)),
                Panel(title="Engines", queries=(Query(_ENGINES_NOW, "{{model_name}}"),)),
                Panel(title="Output tokens of an engine-hour", queries=(
                    Query(f"{rate(n.GENERATION_TOKENS, 'model_name', _ENGINES)} * 3600 / "
                          f"{_ENGINES_NOW}", "{{model_name}}"),),
                    help="What a replica yields at the present load."),
                Panel(title="Cost of an hour", width=12, queries=(
                    Query(f"{_ENGINES_NOW} * $price", "{{model_name}}"),)),
                Panel(title="Cost of a million output tokens", width=12, queries=(
                    Query(f"{_ENGINES_NOW} * $price * 1e6 / "
                          f"({rate(n.GENERATION_TOKENS, 'model_name', _ENGINES)} * 3600)",
                          "{{model_name}}"),),
                    help="At the present load: idle engines cost as much as busy ones."),
                Panel(title="Processor time of 1,000 tokens", unit="s", queries=(
                    Query(f"{rate(n.CPU_SECONDS, 'model_name', _ENGINES)} * 1000 / "
                          f"({rate(n.PROMPT_TOKENS, 'model_name', _ENGINES)} + "
                          f"{rate(n.GENERATION_TOKENS, 'model_name', _ENGINES)})",
                          "{{model_name}}"),),
                    help="Of all processes of the engines; prompt and output tokens alike."),
            ),
        ),
        Row(
            "Tenants in the time shown",
            (
                Panel(title="Prompt tokens by tenant", kind="stat",
                      queries=(_by_tenant("prompt"),)),
                Panel(title="Output tokens by tenant", kind="stat",
                      queries=(_by_tenant("output"),)),
                Panel(title="Cost by tenant", kind="stat", queries=(
                    Query(f"{_increase(n.ROUTER_TENANT_TOKENS, 'tenant', _TENANT)} "
                          f"/ on () group_left () "
                          f"sum(increase({n.ROUTER_TENANT_TOKENS}_total[$__range])) "
                          f"* on () group_left () ({_ENGINE_HOURS} * $price)", "{{tenant}}"),),
                    help="The cost, shared by tokens, prompt and output alike."),
            ),
        ),
        Row(
            "Tenants",
            (
                Panel(title="Tokens by tenant", unit="tokens/s", queries=(
                    Query(rate(n.ROUTER_TENANT_TOKENS, "tenant, kind", _TENANT),
                          "{{tenant}} {{kind}}"),)),
                Panel(title="Requests", unit="reqps", queries=(
                    Query(rate(n.ROUTER_TENANT_REQUESTS, "tenant", _TENANT), "{{tenant}}"),)),
                Panel(title="Refused with 429 or 503", unit="reqps", kind="bars", queries=(
                    Query(rate(n.ROUTER_TENANT_REJECTIONS, "tenant", _TENANT), "{{tenant}}"),)),
                Panel(title="Mean time in the queue", unit="s", width=12, queries=(
                    Query(f"{rate(n.ROUTER_TENANT_QUEUE_SECONDS, 'tenant', _TENANT)} / "
                          f"{rate(n.ROUTER_TENANT_REQUESTS, 'tenant', _TENANT)}",
                          "{{tenant}}"),)),
                Panel(title="Share of all tokens", unit="percentunit", width=12, queries=(
                    Query(f"{rate(n.ROUTER_TENANT_TOKENS, 'tenant', _TENANT)} "
                          f"/ on () group_left () sum(rate({n.ROUTER_TENANT_TOKENS}_total[RANGE]))",
                          "{{tenant}}"),)),
            ),
        ),
    ),
)  # fmt: skip
