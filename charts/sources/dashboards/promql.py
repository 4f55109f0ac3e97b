"""The few shapes that queries have, so that a panel's row says what and not how."""

from __future__ import annotations

from charts.sources.dashboards.grafana import Query


def rate(metric: str, by: str, where: str = "") -> str:
    """Of a counter, each second."""
    selected = f"{{{where}}}" if where else ""
    return f"sum by ({by}) (rate({metric}_total{selected}[RANGE]))"


def quantile(share: float, metric: str, by: str, where: str = "") -> str:
    """`by` may be empty: of all series together."""
    selected = f"{{{where}}}" if where else ""
    labels = f"{by}, le" if by else "le"
    inner = f"sum by ({labels}) (rate({metric}_bucket{selected}[RANGE]))"
    return f"histogram_quantile({share:g}, {inner})"


def quantiles(metric: str, by: str, where: str = "") -> tuple[Query, ...]:
    """Half, 95 and 99 in a hundred."""
    legend = f"{{{{{by.split(', ')[-1]}}}}}"
    return tuple(
        Query(quantile(share, metric, by, where), f"{legend} p{round(share * 100)}")
        for share in (0.5, 0.95, 0.99)
    )


def mean(metric: str, by: str, where: str = "") -> str:
    selected = f"{{{where}}}" if where else ""
    return (
        f"sum by ({by}) (rate({metric}_sum{selected}[RANGE])) / "
        f"sum by ({by}) (rate({metric}_count{selected}[RANGE]))"
    )
