"""The alerts, one row each: when they fire, and what the runbook says. rules.yaml and
docs/runbook.md are made from this table.

`__AVAILABILITY__`, `__TTFT_SHARE__`, `__TTFT_SECONDS__` and `__RUNBOOK__` are put in by the chart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from octavo_engine.protocol import metric_names as names
from octavo_operator import metrics as operator_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    group: str  # slo, serving, engines, routers or operator
    expr: str
    hold: str  # how long it must be true; 0m: at once
    severity: str  # critical: pages someone; warning: handled in working hours
    summary: str  # may use {{ $labels.x }} and {{ $value }}
    means: str
    look: tuple[str, ...]
    do: tuple[str, ...]

    @property
    def anchor(self) -> str:
        return self.name.lower()


def _total(name: str) -> str:
    return f"{name}_total"


_REQUESTS = _total(names.ROUTER_REQUESTS)
_TTFT = names.ROUTER_TIME_TO_FIRST_TOKEN_SECONDS


def _failed_share(window: str) -> str:
    """A stream may fail after code 200, so it is the outcome that counts."""
    failed = f'sum by (model) (rate({_REQUESTS}{{outcome="failed"}}[{window}]))'
    return f'{failed} / sum by (model) (rate({_REQUESTS}{{outcome!="gone"}}[{window}]))'


def _late_share(window: str) -> str:
    in_time = f'sum by (pool) (rate({_TTFT}_bucket{{le="__TTFT_SECONDS__"}}[{window}]))'
    return f"1 - {in_time} / sum by (pool) (rate({_TTFT}_count[{window}]))"


def _burns(share: Any, objective: str, factor: float, long: str, short: str) -> str:
    """Over both windows: the long one for weight, the short one so that it ends soon after."""
    limit = f"{factor:g} * (1 - {objective})"
    return f"({share(long)} > {limit}) and ({share(short)} > {limit})"


_SLO_LOOK = (
    "Dashboard *Octavo / Overview*: since when, which model, which status codes.",
    "`sum by (pool, reason) (rate(octavo_router_rejections_total[5m]))`: refused by the routers "
    "(no room, no engine), or failed by engines?",
    "`kubectl get llmd -A`: a rollout, or a fault with its reason?",
)
_TTFT_LOOK = (
    "Dashboard *Octavo / Overview*: is it the routers' queue (*Time in the queue*)?",
    "Dashboard *Octavo / Engine internals*: or the engines (*Engine: time to first token*)? KV "
    "cache, preemptions, prefix hits.",
)
_TTFT_DO = (
    "More replicas: `kubectl scale llmd/NAME --replicas=N`, or a lower target in "
    "`spec.autoscaling`.",
    "If prefix hits have fallen, see [OctavoHitRateCollapsed](#octavohitratecollapsed).",
    "If one tenant sends most of it: limits in its API key.",
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="OctavoErrorBudgetBurnsFast",
        group="slo",
        expr=_burns(_failed_share, "__AVAILABILITY__", 14.4, "1h", "5m"),
        hold="2m",
        severity="critical",
        summary="{{ $labels.model }}: {{ $value | humanizePercentage }} of requests fail",
        means="Requests fail so often that 30 days' allowance of failures is gone in two days.",
        look=_SLO_LOOK,
        do=(
            "After a change: revert it; what served before still serves.",
            "Rejections `queue_full`, `queue_timeout`: more replicas.",
            "Rejections `no_endpoints`: [OctavoNoEngines](#octavonoengines).",
            "Failures of one engine: delete its pod; its streams continue elsewhere.",
        ),
    ),
    Alert(
        name="OctavoErrorBudgetBurnsSlowly",
        group="slo",
        expr=_burns(_failed_share, "__AVAILABILITY__", 3, "1d", "2h"),
        hold="15m",
        severity="warning",
        summary="{{ $labels.model }}: {{ $value | humanizePercentage }} of requests fail, all day",
        means="Requests fail so often that 30 days' allowance of failures is gone in ten.",
        look=_SLO_LOOK,
        do=("As for [OctavoErrorBudgetBurnsFast](#octavoerrorbudgetburnsfast), by day.",),
    ),
    Alert(
        name="OctavoTTFTBudgetBurnsFast",
        group="slo",
        expr=_burns(_late_share, "__TTFT_SHARE__", 6, "1h", "5m"),
        hold="5m",
        severity="critical",
        summary="{{ $labels.pool }}: {{ $value | humanizePercentage }} of first tokens come late",
        means="First tokens are late far more often than the objective allows.",
        look=_TTFT_LOOK,
        do=_TTFT_DO,
    ),
    Alert(
        name="OctavoTTFTBudgetBurnsSlowly",
        group="slo",
        expr=_burns(_late_share, "__TTFT_SHARE__", 1.5, "1d", "2h"),
        hold="15m",
        severity="warning",
        summary="{{ $labels.pool }}: {{ $value | humanizePercentage }} of first tokens come late, "
        "all day",
        means="First tokens are late more often than the objective allows, over a day.",
        look=_TTFT_LOOK,
        do=_TTFT_DO,
    ),
    Alert(
        name="OctavoNoEngines",
        group="serving",
        expr=f"sum by (pool) (rate({_total(names.ROUTER_REJECTIONS)}"
        '{reason="no_endpoints"}[5m])) > 0',
        hold="2m",
        severity="critical",
        summary="{{ $labels.pool }}: requests find no engine",
        means="Requests waited for an engine as long as they may, and none came.",
        look=(
            "`kubectl get llmd -A`: REASON shows what keeps pods from serving; "
            "`kubectl describe llmd/NAME` has the sentence.",
            f"`sum by (pool, state) ({names.ROUTER_ENDPOINTS})`: none known, or all ejected or "
            "down?",
        ),
        do=(
            "Do what the condition's sentence ends with (docs/operator.md has all reasons).",
            "Known and down: is there a NetworkPolicy between routers and engines?",
            "Waking from zero takes longer than `router.holdSeconds`: raise it, or keep a replica.",
        ),
    ),
    Alert(
        name="OctavoQueueSlow",
        group="serving",
        expr="histogram_quantile(0.95, sum by (pool, le) "
        f"(rate({names.ROUTER_QUEUE_DURATION_SECONDS}_bucket[10m]))) > 10",
        hold="10m",
        severity="warning",
        summary="{{ $labels.pool }}: one request in twenty waits {{ $value | humanizeDuration }}",
        means="All engines of the pool are full, and requests wait for room.",
        look=("Dashboard *Octavo / Router*: queue, requests in flight by engine.",),
        do=(
            "More replicas, or a lower target in `spec.autoscaling`.",
            "Engines full and idle at once: `engine.maxNumSeqs` is too low for the hardware.",
        ),
    ),
    Alert(
        name="OctavoRequestsLost",
        group="serving",
        expr=f"sum by (pool) (rate({_total(names.ROUTER_RETRIES_EXHAUSTED)}[10m])) > 0.01 * "
        f"sum by (pool) (rate({names.ROUTER_REQUEST_DURATION_SECONDS}_count[10m]))",
        hold="5m",
        severity="warning",
        summary="{{ $labels.pool }}: requests fail although they were tried elsewhere",
        means="More than one request in a hundred failed after all its attempts: not one engine "
        "is at fault, but what they have in common.",
        look=(
            f"`sum by (endpoint, outcome) (rate({_total(names.ROUTER_UPSTREAM_REQUESTS)}[5m]))`.",
            "The routers' log: `Lost attempts` has the problem in words.",
            "The engines' previous log: `kubectl logs --previous`.",
        ),
        do=(
            "A request that kills engines: "
            "[OctavoRequestKillsEngines](#octavorequestkillsengines).",
            "After a change of image or model: revert it.",
        ),
    ),
    Alert(
        name="OctavoRequestKillsEngines",
        group="serving",
        expr=f"sum by (pool) (increase({_total(names.ROUTER_QUARANTINED_REQUESTS)}[15m])) > 0",
        hold="0m",
        severity="warning",
        summary="{{ $labels.pool }}: a request crashed engines",
        means="Two engines ended, one after the other, while they answered the same request. The "
        "router refuses that request with 422 `request_quarantined` for `retry.quarantine_s`, "
        "from every client.",
        look=(
            "The routers' log: `Refuses a request from now on` has its path, the digest of its "
            "body and a `request_id`; `Lost attempts` before that names the engines.",
            "The engines' previous log: `kubectl logs --previous`.",
            "`kubectl get events`: were both engines ended by something else at the same time (a "
            "node, memory)? Then the request is innocent, and may come again after that time.",
        ),
        do=(
            "Find its client by the `request_id` in the access log, and have it stop.",
            "Report the request with the engines' log: no request may end an engine.",
            "An innocent request that cannot wait: restart the routers, or set "
            "`retry.quarantine_s: 0` for a while.",
        ),
    ),
    Alert(
        name="OctavoHitRateCollapsed",
        group="serving",
        expr=f"sum by (pool) (rate({_total(names.ROUTER_PREFIX_CACHED_TOKENS)}[30m])) / "
        f"sum by (pool) (rate({_total(names.ROUTER_PREFIX_QUERIED_TOKENS)}[30m])) < 0.5 * "
        f"(sum by (pool) (rate({_total(names.ROUTER_PREFIX_CACHED_TOKENS)}[1d] offset 1h)) / "
        f"sum by (pool) (rate({_total(names.ROUTER_PREFIX_QUERIED_TOKENS)}[1d] offset 1h)) > 0.2)",
        hold="30m",
        severity="warning",
        summary="{{ $labels.pool }}: only {{ $value | humanizePercentage }} of prompts are cached",
        means="Engines find less than half as much of their prompts in the cache as the day "
        "before: first tokens are late, and the same load needs more replicas.",
        look=(
            "Dashboard *Octavo / Router*: predicted against reported hits. Apart: routers know "
            "too little of what engines hold (age of signals). Together and low: the prompts or "
            "the cache have changed.",
            "Dashboard *Octavo / Engine internals*: KV cache full, preemptions?",
        ),
        do=(
            "A client that puts the time or an id at the start of its system prompt: have it "
            "put that last.",
            "KV cache full: more memory for it, or more replicas.",
            "A policy that was changed to `round-robin` or `least-load`: back to `prefix-load`.",
        ),
    ),
    Alert(
        name="OctavoClockSet",
        group="serving",
        expr=f"increase({_total(names.CLOCK_JUMPS)}[15m]) > 0 or "
        f"increase({_total(names.ROUTER_CLOCK_JUMPS)}[15m]) > 0",
        hold="0m",
        severity="warning",
        summary="The wall clock of {{ $labels.namespace }}/{{ $labels.pod }} was set",
        means="The clock of the pod's node moved by two seconds or more at once. No request ends "
        "early: durations are measured by another clock. But times in logs and answers are "
        "wrong from then on, or were wrong until then, and certificates and signed requests are "
        "judged by that clock.",
        look=(
            "The pod's log: `The clock was set` has the seconds; for five minutes `/health` of an "
            "engine has them too, in the header `octavo-clock-jump`.",
            "`kubectl get pod -o wide`: all pods of one node, or pods of all nodes?",
            "On the node: `chronyc tracking`, or `timedatectl`.",
        ),
        do=(
            "Once, after a node slept, was moved or had no time server: nothing, if the clock is "
            "right now.",
            "Again and again: drain the node, and mend its time service (two that set the same "
            "clock, or a hypervisor that does).",
            "Certificates that are not yet valid or expired after it: correct the clock; they "
            "are taken again at the next connection.",
        ),
    ),
    Alert(
        name="OctavoEngineStalled",
        group="engines",
        expr=f'{names.ENGINE_STATE}{{state="stalled"}} == 1 or '
        f"({names.LAST_STEP_AGE_SECONDS} > 30 and {names.NUM_REQUESTS_RUNNING} > 0)",
        hold="1m",
        severity="critical",
        summary="{{ $labels.namespace }}/{{ $labels.pod }} computes nothing",
        means="The engine has sequences to compute and makes no step. Its routers take it out and "
        "continue its streams elsewhere, and its liveness probe restarts it; the alert means that "
        "this did not help.",
        look=(
            "`kubectl describe pod`: is the liveness probe failing, is it restarting?",
            "The pod's previous log: `kubectl logs --previous`.",
        ),
        do=("Delete the pod.", "On one node again and again: drain the node."),
    ),
    Alert(
        name="OctavoEngineCorrupt",
        group="engines",
        expr=f"increase({_total(names.CORRUPTED_REQUESTS)}[15m]) > 0",
        hold="0m",
        severity="critical",
        summary="{{ $labels.namespace }}/{{ $labels.pod }} computes NaN",
        means="Logits were NaN. The requests were failed; memory, weights or a kernel is at fault.",
        look=(
            "One pod or all? One: its node's hardware (memory and GPU errors). All: the model's "
            "files or the last change of image, quantisation or dtype.",
        ),
        do=(
            "One pod: drain its node.",
            "All: revert the change; set `model.digest`, so that files cannot change unseen.",
        ),
    ),
    Alert(
        name="OctavoKVCacheFull",
        group="engines",
        expr=f"{names.KV_CACHE_USAGE_PERC} > 0.95 and "
        f"rate({_total(names.NUM_PREEMPTIONS)}[10m]) > 0.1",
        hold="10m",
        severity="warning",
        summary="{{ $labels.namespace }}/{{ $labels.pod }} preempts sequences for lack of KV "
        "blocks",
        means="Sequences lose what was computed for them and start over: work is done twice.",
        look=(
            "Dashboard *Octavo / Engine internals*: lengths of prompts and answers, running "
            "sequences.",
        ),
        do=(
            "More memory for the KV cache, or more replicas.",
            "Or a lower `engine.maxNumSeqs`: fewer at once that are not set back are faster.",
        ),
    ),
    Alert(
        name="OctavoEnginesEjected",
        group="routers",
        expr=f'max by (pool) ({names.ROUTER_ENDPOINTS}{{state="ejected"}}) > 0',
        hold="5m",
        severity="warning",
        summary="{{ $labels.pool }}: {{ $value }} engines are ejected after failures",
        means="Engines failed or were far slower than the others, and test generations did not "
        "bring them back.",
        look=(
            "The routers' log: `Set an engine aside` has the reason.",
            "`/debug/endpoints` of a router, with `server.debug_endpoints`.",
        ),
        do=("Delete the pod.", "On one node again and again: drain the node."),
    ),
    Alert(
        name="OctavoSignalsStale",
        group="routers",
        expr=f"max by (pool, endpoint) ({names.ROUTER_ENDPOINT_SIGNAL_AGE_SECONDS}) > 30",
        hold="5m",
        severity="warning",
        summary="{{ $labels.pool }}: {{ $labels.endpoint }} has not reported its load for "
        "{{ $value | humanizeDuration }}",
        means="A router decides without knowing that engine's load and prefixes.",
        look=(
            f"`rate({_total(names.ROUTER_SIGNAL_CONNECTS)}[5m])` by outcome: a number is a status.",
        ),
        do=(
            "401: the engine wants a key: `router.engineKey`.",
            "failed: a NetworkPolicy, or the engine's port.",
        ),
    ),
    Alert(
        name="OctavoDiscoveryFailing",
        group="routers",
        expr=f"sum by (source) (rate({_total(names.ROUTER_DISCOVERY_ERRORS)}[10m])) > 0 and "
        f"max by (source) ({names.ROUTER_DISCOVERY_AGE_SECONDS}) > 120",
        hold="5m",
        severity="warning",
        summary="Routers cannot discover new engines from {{ $labels.source }}",
        means="What routers know serves on; pods that come or go are not noticed (but by failing).",
        look=("The routers' log names the error of the API server, of DNS or of the file.",),
        do=(
            "403: the router's Role: upgrade the release, or `rbac.create`.",
            "Timeouts: `networkPolicy.apiServerCIDRs` and `apiServerPorts`.",
        ),
    ),
    Alert(
        name="OctavoRouterLoopSlow",
        group="routers",
        expr="histogram_quantile(0.99, sum by (namespace, pod, le) "
        f"(rate({names.ROUTER_LOOP_LAG_SECONDS}_bucket[10m]))) > 0.1",
        hold="10m",
        severity="warning",
        summary="{{ $labels.namespace }}/{{ $labels.pod }} is {{ $value | humanizeDuration }} late",
        means="The router's event loop is overloaded or throttled: every token is late by that.",
        look=("CPU of the router's pods: one core each is the most they can use.",),
        do=("More routers: `router.replicas`.", "No CPU limit in `router.resources`."),
    ),
    Alert(
        name="OctavoRouterConfigRefused",
        group="routers",
        expr=f'increase({_total(names.ROUTER_CONFIG_RELOADS)}{{outcome="failed"}}[15m]) > 0',
        hold="0m",
        severity="warning",
        summary="{{ $labels.namespace }}/{{ $labels.pod }} kept its old configuration",
        means="A configuration was read again and is wrong somewhere; nothing of it was taken.",
        look=("The router's log: `Kept the old configuration`, with the field.",),
        do=("Correct `router.config`, and upgrade the release.",),
    ),
    Alert(
        name="OctavoRoutersAbsent",
        group="routers",
        expr=f"absent({names.ROUTER_INFO}_info)",
        hold="10m",
        severity="critical",
        summary="No router is scraped",
        means="Either no router runs, or Prometheus does not see them, and then none of the other "
        "alerts works.",
        look=(
            "`kubectl get pods -l app.kubernetes.io/component=router -A`.",
            "Targets in Prometheus: are there any, and what is their error?",
        ),
        do=(
            "No targets: `monitoring.podMonitor`, and `monitoring.labels` that your Prometheus "
            "selects by.",
            "Timeouts: `monitoring.namespace` must be that of Prometheus.",
        ),
    ),
    Alert(
        name="OctavoOperatorWithoutLeader",
        group="operator",
        expr=f"(sum({operator_names.IS_LEADER}) or vector(0)) != 1",
        hold="5m",
        severity="critical",
        summary="{{ $value }} operators are leaders instead of one",
        means="No operator (or more than one) reconciles LLMDeployments. Engines that serve keep "
        "serving; nothing is scaled, replaced or rolled out.",
        look=(
            "`kubectl get lease octavo-operator`: who holds it, since when?",
            "The operator's log and its pod's events.",
        ),
        do=(
            "None: follow the pod's events; the API server must be reachable.",
            "Two: two releases in one cluster need `operator.watchNamespaces` that differ, and "
            "an alert each.",
        ),
    ),
    Alert(
        name="OctavoReconcileFailing",
        group="operator",
        expr=f'sum(rate({_total(operator_names.RECONCILES)}{{outcome="failed"}}[10m])) > 0.3 * '
        f"sum(rate({_total(operator_names.RECONCILES)}[10m]))",
        hold="10m",
        severity="warning",
        summary="{{ $value | humanize }} reconciles a second fail",
        means="The API server refuses what the operator writes, or does not answer.",
        look=(
            f"`sum by (verb, error) (rate({_total(operator_names.API_ERRORS)}[5m]))`.",
            "`kubectl get llmd -A`: REASON of those that are stuck.",
        ),
        do=(
            "403: upgrade the release, so that its Role is that of this version.",
            "Quota, LimitRange, webhook: the condition names it.",
        ),
    ),
    Alert(
        name="OctavoOperatorWatchStale",
        group="operator",
        expr=f"max({operator_names.WATCH_AGE_SECONDS}) > 600",
        hold="5m",
        severity="warning",
        summary="The operator's watches have been silent for {{ $value | humanizeDuration }}",
        means="Watches are silent, and comparisons do not succeed either; the liveness probe "
        "should have restarted it.",
        look=("The operator's log; is the API server overloaded?",),
        do=("Delete the operator's pod.",),
    ),
    Alert(
        name="OctavoRoutersUnheard",
        group="operator",
        expr=f"sum by (reason) (rate({_total(operator_names.ROUTER_ERRORS)}[5m])) > 0",
        hold="5m",
        severity="warning",
        summary="The operator cannot read the routers' state: {{ $labels.reason }}",
        means="New pods do not become Ready (their readiness gate stays closed): rollouts stall.",
        look=("The operator's log has what to do, once a minute.",),
        do=(
            "unauthorized: both read the same Secret: `router.stateToken`; restart both.",
            "tls: `router.tls.caKey`, and the certificate must be for the routers' Service.",
            "unreachable: a NetworkPolicy between operator and routers.",
        ),
    ),
    Alert(
        name="OctavoOperatorBug",
        group="operator",
        expr=f"increase({_total(operator_names.BUGS)}[15m]) > 0",
        hold="0m",
        severity="warning",
        summary="A reconcile raised an unexpected exception",
        means="A mistake in the operator. Other LLMDeployments are not affected; this one is "
        "tried again.",
        look=("The operator's log has the stack.",),
        do=("Report it, with the LLMDeployment.",),
    ),
)


def render() -> str:
    """rules.yaml: what a PrometheusRule has as its spec."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for alert in ALERTS:
        groups.setdefault(alert.group, []).append(_rule(alert))
    body = {
        "groups": [{"name": f"octavo-{name}", "rules": rules} for name, rules in groups.items()]
    }
    head = "# Made from charts/sources/alerts.py by `python -m charts.sources`.\n"
    return head + yaml.safe_dump(body, sort_keys=False, width=1000)


def _rule(alert: Alert) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expr}
    if alert.hold != "0m":
        rule["for"] = alert.hold
    rule["labels"] = {"severity": alert.severity}
    rule["annotations"] = {
        "summary": alert.summary,
        "description": alert.means,
        "runbook_url": f"__RUNBOOK__#{alert.anchor}",
    }
    return rule
