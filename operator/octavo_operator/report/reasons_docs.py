"""`python -m octavo_operator.report.reasons_docs` in a checkout: the tables of docs/operator.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo_operator.reasons import ADVICE, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path("docs/operator.md")
BEGIN = "<!-- reasons: made by `python -m octavo_operator.report.reasons_docs` -->"
END = "<!-- end of reasons -->"

# Where each part begins; the order of the enumeration is that of severity.
_PARTS = (
    ("The spec", Reason.SPEC_INVALID),
    ("The API server refuses an object or a pod", Reason.QUOTA_EXCEEDED),
    ("There is no place for the pod", Reason.VOLUME_CLASS_MISSING),
    ("The pod cannot start", Reason.IMAGE_NOT_FOUND),
    ("The model", Reason.MODEL_UNAUTHORIZED),
    ("The engine", Reason.OUT_OF_MEMORY),
    ("The node", Reason.POD_EVICTED),
    ("The way to the pod", Reason.NOT_ROUTABLE),
    ("The rollout", Reason.PROGRESS_DEADLINE_EXCEEDED),
    ("No faults", Reason.ACCEPTED),
)


def with_reasons(page: str) -> str:
    """The page with the text between the two marks regenerated."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} must have the lines {BEGIN} and {END}, in this order")
    return f"{head}{BEGIN}\n" + "\n".join(_tables()) + f"\n\n{END}{tail}"


def _tables() -> Iterator[str]:
    titles = {first: title for title, first in _PARTS}
    for reason in Reason:
        if reason in titles:
            yield from ("", f"### {titles[reason]}", "")
            yield from ("| reason | means | what to try |", "|---|---|---|")
        advice = ADVICE[reason]
        yield f"| `{reason}` | {advice.meaning} | {advice.fix or 'nothing'} |"


def main() -> None:
    PAGE.write_text(with_reasons(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
