"""What the operator does: reconciles, faults, and the API server."""

from __future__ import annotations

from charts.sources.dashboards.grafana import Dashboard, Panel, Query, Row
from charts.sources.dashboards.promql import mean, quantiles, rate
from octavo_engine.protocol import metric_names as n
from octavo_operator import metrics as m

OPERATOR = Dashboard(
    name="operator",
    title="Operator",
    description="Reconciles, rollouts and the way to the API server.",
    variables=(),
    rows=(
        Row(
            "Now",
            (
                Panel(title="Leaders", queries=(Query(f"sum({m.IS_LEADER})"),), kind="stat",
                      width=4, help="One, always."),
                Panel(title="LLMDeployments", queries=(Query(f"max({m.DEPLOYMENTS})"),),
                      kind="stat", width=4),
                Panel(title="Objects in memory", queries=(Query(f"max({m.OBJECTS})"),),
                      kind="stat", width=4),
                Panel(title="Routers that answer", queries=(Query(f"max({m.ROUTERS})"),),
                      kind="stat", width=4, help="Without them no new pod becomes Ready."),
                Panel(title="Waiting keys", queries=(Query(f"max({m.QUEUE_DEPTH})"),),
                      kind="stat", width=4),
                Panel(title="Bugs", queries=(Query(f"sum({m.BUGS}_total)"),), kind="stat",
                      width=4, help="Reconciles that ended in something unexpected."),
            ),
        ),
        Row(
            "Reconciles",
            (
                Panel(title="By outcome", queries=(Query(rate(m.RECONCILES, "outcome"),
                      "{{outcome}}"),), unit="ops", kind="bars"),
                Panel(title="Duration", queries=(
                    *quantiles(m.RECONCILE_SECONDS, "job"),
                    Query(mean(m.RECONCILE_SECONDS, "job"), "{{job}} mean"),
                ), unit="s"),
                Panel(title="Queue", queries=(Query(f"max by (pod) ({m.QUEUE_DEPTH})",
                      "{{pod}}"),)),
            ),
        ),
        Row(
            "Rollouts, as routers see them",
            (
                Panel(
                    title="Engines by state",
                    queries=(
                        Query(
                            f"sum by (pool, state) (max by (pool, state) ({n.ROUTER_ENDPOINTS}))",
                            "{{pool}} {{state}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    title="Pods that came and went",
                    queries=(
                        Query(rate(n.ROUTER_STATE_CHANGES, "pool, state"), "{{pool}} {{state}}"),
                    ),
                    unit="ops", width=12,
                ),
            ),
        ),
        Row(
            "API server",
            (
                Panel(title="Calls", queries=(Query(rate(m.API_CALLS, "verb, kind"),
                      "{{verb}} {{kind}}"),), unit="ops"),
                Panel(title="Errors", queries=(Query(rate(m.API_ERRORS, "verb, error"),
                      "{{verb}} {{error}}"),), unit="ops", kind="bars"),
                Panel(title="Watch events", queries=(Query(rate(m.EVENTS_RECEIVED, "kind"),
                      "{{kind}}"),), unit="ops"),
                Panel(title="Since the watches were heard", queries=(
                      Query(f"max by (pod) ({m.WATCH_AGE_SECONDS})", "{{pod}}"),), unit="s",
                      width=12),
                Panel(title="Routers that did not report", queries=(
                      Query(rate(m.ROUTER_ERRORS, "reason"), "{{reason}}"),), unit="ops",
                      width=12),
            ),
        ),
    ),
)  # fmt: skip
