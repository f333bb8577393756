"""Text that markdown takes literally: for the pages of reports and of decisions, in a table as elsewhere."""

from __future__ import annotations

import html
import re


def escape_markdown(text: str) -> str:
    """Text that markdown and HTML take literally, on one line.

    Example:
        >>> escape_markdown("a|b <i> [x](y)")
        'a\\\\|b &lt;i&gt; \\\\[x\\\\](y)'
    """
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
