"""docs/runbook.md: a chapter for each alert, from the same table."""

from __future__ import annotations

from charts.sources.alerts import ALERTS, Alert

BEGIN = "<!-- alerts: made from charts/sources/alerts.py by `python -m charts.sources` -->"
END = "<!-- end of alerts -->"


def put_into(text: str) -> str:
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    chapters = "\n\n".join(map(_chapter, ALERTS))
    return f"{head}{BEGIN}\n\n{chapters}\n\n{END}{tail}"


def _chapter(alert: Alert) -> str:
    hold = "at once" if alert.hold == "0m" else f"after {alert.hold}"
    lines = [
        f"## {alert.name}",
        "",
        f"*{alert.severity}, {hold}.* {alert.means}",
        "",
        "Look at:",
        "",
        *(f"- {each}" for each in alert.look),
        "",
        "Do:",
        "",
        *(f"- {each}" for each in alert.do),
        "",
        "```promql",
        _readable(alert.expr),
        "```",
    ]
    return "\n".join(lines)


def _readable(expr: str) -> str:
    """With the default objectives put in."""
    for name, value in (("AVAILABILITY", "0.999"), ("TTFT_SHARE", "0.95"), ("TTFT_SECONDS", "2.5")):
        expr = expr.replace(f"__{name}__", value)
    return expr
