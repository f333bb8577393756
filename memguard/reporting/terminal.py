"""The exposure table of a report, for a terminal or a pipe."""

from __future__ import annotations

from rich.table import Table

from memguard.audit.report import AuditReport


def exposure_table(report: AuditReport, *, title: str) -> Table:
    """Exposure by format and planned tier with realised counts; controls last. Bits."""
    table = Table(title=f"{title}: exposure in bits ({report.status}, {report.subject.kind})", title_justify="left")
    for column in ("format", "tier", "n", "seen", "mean", "median", "interval of the median", "extracted"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for row in report.tiers:
        table.add_row(
            row.format,
            str(row.tier),
            str(row.n),
            _figure(row.mean_num_seen),
            _figure(row.mean_bits),
            _figure(row.median_bits),
            f"{_figure(row.low_bits)} .. {_figure(row.high_bits)} ({row.coverage:.0%})",
            str(row.num_extracted),
        )
    for control in report.controls:
        expected = f"chance {control.expected_exposure_bits:.2f}"
        table.add_row(
            control.format, "control", str(control.num_controls), "0", _figure(control.mean_exposure_bits), "", expected, ""
        )
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
