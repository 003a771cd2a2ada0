"""Rows of a report: what was checked, what was found, and the limit beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One line; ``ok`` is None for a measurement without a goal."""

    check: str
    case: str
    result: str
    ok: bool | None = None
    figures: dict[str, float] = field(default_factory=dict)


Check = Callable[[], Sequence[Row]]


def guarded(name: str, check: Check) -> list[Row]:
    """The check's rows; one row with the error if it raises, so that others still run."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - a report of what fails is the purpose
        message = " ".join(str(error).split())
        return [Row(name, type(error).__name__, message[:200] or "no message", False)]


def table(rows: Sequence[Row]) -> str:
    """Aligned columns; failures are marked, and counted in the last line."""
    marks = {True: "ok", False: "FAIL", None: ""}
    cells = [("check", "case", "result", ""), *((r.check, r.case, r.result, marks[r.ok]) for r in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = ["  ".join((*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3])).rstrip()
             for line in cells]  # fmt: skip
    failed = sum(row.ok is False for row in rows)
    return "\n".join([*lines, f"{len(rows)} rows, {failed} failed"])


def as_json(rows: Sequence[Row], machine: dict[str, str]) -> str:
    """Everything, for comparison with other runs."""
    return json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
