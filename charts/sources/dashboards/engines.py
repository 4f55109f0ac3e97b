"""What engines do: steps, KV cache, queue, prefix hits, preemptions."""

from __future__ import annotations

from charts.sources.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from charts.sources.dashboards.promql import quantiles, rate
from octavo_engine.protocol import metric_names as n

_MODEL = 'model_name=~"$model"'
_BY = "namespace, pod"


def _gauge(metric: str) -> Query:
    return Query(f"{metric}{{{_MODEL}}}", "{{pod}}")


def _rate(metric: str) -> Query:
    return Query(rate(metric, _BY, _MODEL), "{{pod}}")


ENGINES = Dashboard(
    name="engines",
    title="Engine internals",
    description="Inside the engines: what they compute, and what limits them.",
    variables=(Variable("model", "model_name", n.NUM_REQUESTS_RUNNING),),
    rows=(
        Row(
            "Work",
            (
                Panel(title="Running sequences", queries=(_gauge(n.NUM_REQUESTS_RUNNING),)),
                Panel(title="Waiting sequences", queries=(_gauge(n.NUM_REQUESTS_WAITING),)),
                Panel(
                    title="Prompt tokens not yet computed",
                    queries=(_gauge(n.NUM_QUEUED_TOKENS),),
                ),
                Panel(
                    title="Generated tokens",
                    queries=(_rate(n.GENERATION_TOKENS),), unit="tokens/s",
                ),
                Panel(
                    title="Prompt tokens", queries=(_rate(n.PROMPT_TOKENS),), unit="tokens/s",
                    help="Cached ones included.",
                ),
                Panel(
                    title="Sequences finished",
                    queries=(
                        Query(
                            rate(n.REQUEST_SUCCESS, "finished_reason", _MODEL),
                            "{{finished_reason}}",
                        ),
                    ),
                    unit="ops", kind="bars",
                ),
            ),
        ),
        Row(
            "KV cache",
            (
                Panel(
                    title="KV cache in use", queries=(_gauge(n.KV_CACHE_USAGE_PERC),),
                    unit="percentunit", most=1,
                ),
                Panel(
                    title="Prefix hits",
                    queries=(
                        Query(
                            f"{rate(n.PREFIX_CACHE_HITS, _BY, _MODEL)} / "
                            f"{rate(n.PREFIX_CACHE_QUERIES, _BY, _MODEL)}",
                            "{{pod}}",
                        ),
                    ),
                    unit="percentunit", most=1,
                    help="Share of prompt tokens that were in the cache.",
                ),
                Panel(
                    title="Preemptions", queries=(_rate(n.NUM_PREEMPTIONS),), unit="ops",
                    help="Sequences set back for want of KV blocks: their work is done twice.",
                ),
                Panel(
                    title="Length of prompts",
                    queries=quantiles(n.REQUEST_PROMPT_TOKENS, "model_name", _MODEL),
                ),
                Panel(
                    title="Length of answers",
                    queries=quantiles(n.REQUEST_GENERATION_TOKENS, "model_name", _MODEL),
                ),
                Panel(
                    title="KV blocks",
                    queries=(
                        Query(
                            "sum by (model_name, block_size, num_gpu_blocks) "
                            f"({n.CACHE_CONFIG_INFO}{{{_MODEL}}})",
                            "{{model_name}}: {{num_gpu_blocks}} of {{block_size}} tokens",
                        ),
                    ),
                    help="Engines of each geometry.",
                ),
            ),
        ),
        Row(
            "Steps",
            (
                Panel(title="Steps", queries=(_rate(n.STEPS),), unit="ops"),
                Panel(title="Last step took", queries=(_gauge(n.STEP_SECONDS),), unit="s"),
                Panel(
                    title="Since the last step",
                    queries=(_gauge(n.LAST_STEP_AGE_SECONDS),), unit="s",
                    help="Grows while an engine is idle, too.",
                ),
                Panel(
                    title="Engine: time to first token",
                    queries=quantiles(n.TIME_TO_FIRST_TOKEN_SECONDS, "model_name", _MODEL),
                    unit="s",
                ),
                Panel(
                    title="Engine: between outputs",
                    queries=quantiles(n.INTER_TOKEN_LATENCY_SECONDS, "model_name", _MODEL),
                    unit="s",
                ),
                Panel(
                    title="Engine: time in the queue",
                    queries=quantiles(n.REQUEST_QUEUE_TIME_SECONDS, "model_name", _MODEL),
                    unit="s",
                ),
            ),
        ),
        Row(
            "LoRA adapters",
            (
                Panel(
                    title="Adapters in memory", queries=(_gauge(n.LORA_ADAPTERS_HELD),),
                ),
                Panel(
                    title="Reading an adapter took",
                    queries=quantiles(n.LORA_LOAD_SECONDS, "model_name", _MODEL), unit="s",
                ),
                Panel(
                    title="Adapters that could not be read",
                    queries=(_rate(n.LORA_LOAD_FAILURES),), unit="ops",
                ),
            ),
        ),
        Row(
            "Health",
            (
                Panel(
                    title="State",
                    queries=(
                        Query(f"sum by (state) ({n.ENGINE_STATE}{{{_MODEL}}})", "{{state}}"),
                    ),
                    kind="bars",
                ),
                Panel(
                    title="Loading took", queries=(_gauge(n.MODEL_LOAD_SECONDS),), unit="s",
                ),
                Panel(
                    title="Requests failed by NaN",
                    queries=(
                        Query(
                            f"sum by ({_BY}) (increase({n.CORRUPTED_REQUESTS}_total"
                            f"{{{_MODEL}}}[RANGE]))",
                            "{{pod}}",
                        ),
                    ),
                ),
                Panel(
                    title="HTTP answers",
                    queries=(
                        Query(
                            rate(n.HTTP_REQUESTS, "route, status", _MODEL),
                            "{{route}} {{status}}",
                        ),
                    ),
                    unit="reqps", width=16,
                ),
                Panel(
                    title="HTTP requests in flight",
                    queries=(_gauge(n.NUM_HTTP_REQUESTS_IN_FLIGHT),),
                ),
            ),
        ),
    ),
)  # fmt: skip
