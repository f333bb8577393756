"""Shows an `AuditReport` to people and trackers: HTML page, markdown summary, figures, JSON lines, Weights & Biases.

Reads reports and decisions and nothing else; measures and decides nothing. `render_html` and `render_markdown` load on
first use, so that importing the package costs neither jinja2 nor matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memguard.reporting.html import render_html
    from memguard.reporting.markdown import render_markdown

__all__ = ["render_html", "render_markdown"]


def __getattr__(name: str) -> Any:
    if name == "render_html":
        from memguard.reporting.html import render_html

        return render_html
    if name == "render_markdown":
        from memguard.reporting.markdown import render_markdown

        return render_markdown
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
