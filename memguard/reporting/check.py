"""The table and the lines of `memguard check`, for a terminal or a pipe. Ids and counts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from memguard.reporting.formatting import show_count, show_number, show_percent

if TYPE_CHECKING:
    from memguard.audit.check import CheckResult


def check_table(result: CheckResult) -> Table:
    """By format: canaries, how many come into the loss, contaminated, failed at which step, share of tokens."""
    share = f"{show_percent(result.token_share)} of the tokens are canaries, at most {show_percent(result.max_share)}"
    how = f"{show_count(result.num_rows)} rows, packing {result.packing}, {result.mode or 'nothing planted'}"
    table = Table(title=f"pre-flight: {how}; {share}", title_justify="left")
    columns = ("n", "checked", "in the loss", "contaminated", "failed at", "share", "tokens each")
    for column in ("format", *columns):
        table.add_column(column, justify="left" if column in ("format", "failed at") else "right")
    for row in result.formats:
        table.add_row(
            row.format,
            show_count(row.num_canaries),
            show_count(row.num_checked),
            show_count(row.num_reached) + (f" ({row.num_unseen} unseen)" if row.num_unseen else ""),
            show_count(row.num_contaminated),
            ", ".join(f"{step}: {number}" for step, number in row.failed_at.items()) or "-",
            show_percent(row.token_share),
            show_number(row.tokens_per_canary),
        )
    return table


def check_lines(result: CheckResult) -> list[str]:
    """Every failure with its cure, then the notes, a line each; what the check says where nothing failed."""
    lines = list(result.failures) or ["every canary that was checked reaches the loss."]
    if any(row.num_contaminated for row in result.formats):
        lines.append("contaminated: other text of the same row stands before the canary and can be attended to; no failure.")
    if result.is_plan_drawn:
        lines.append("no plan exists yet: one was drawn in memory for this check and not kept.")
    return [*lines, *(f"note: {note}" for note in result.notes)]
