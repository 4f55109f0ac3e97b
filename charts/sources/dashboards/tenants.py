"""Who uses what: tokens, requests, waiting and refusals by tenant and model."""

from __future__ import annotations

from charts.sources.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from charts.sources.dashboards.promql import rate
from octavo_engine.protocol import metric_names as n

_TENANT = 'tenant=~"$tenant"'


def _increase(metric: str, by: str, where: str) -> str:
    """Over the whole time that the dashboard shows."""
    return f"sum by ({by}) (increase({metric}_total{{{where}}}[$__range]))"


TENANTS = Dashboard(
    name="tenants",
    title="Tenants and tokens",
    description="What each tenant and model used. Tenants are those of the routers' API keys.",
    variables=(Variable("tenant", "tenant", f"{n.ROUTER_TENANT_REQUESTS}_total"),),
    rows=(
        Row(
            "In the time shown",
            (
                Panel(title="Prompt tokens by tenant", kind="stat", width=12, queries=(
                    Query(_increase(n.ROUTER_TENANT_TOKENS, "tenant", f'kind="prompt", {_TENANT}'),
                          "{{tenant}}"),)),
                Panel(title="Output tokens by tenant", kind="stat", width=12, queries=(
                    Query(_increase(n.ROUTER_TENANT_TOKENS, "tenant", f'kind="output", {_TENANT}'),
                          "{{tenant}}"),)),
            ),
        ),
        Row(
            "Tenants",
            (
                Panel(title="Tokens", unit="tokens/s", queries=(
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
        Row(
            "Models",
            (
                Panel(title="Tokens by model", unit="tokens/s", width=12, queries=(
                    Query(rate(n.ROUTER_TOKENS, "model, kind"), "{{model}} {{kind}}"),)),
                Panel(title="Output tokens for each engine", unit="tokens/s", width=12, queries=(
                    Query(f"sum(rate({n.GENERATION_TOKENS}_total[RANGE])) / "
                          f"count({n.NUM_REQUESTS_RUNNING})", "mean"),),
                    help="What a replica yields: divide its price by it."),
            ),
        ),
    ),
)  # fmt: skip
