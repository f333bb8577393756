"""matplotlib's SVG as one inline element: own colours for light, dark and print, scoped names, a text alternative.

matplotlib draws with placeholder colours, which become CSS variables of the element; so nothing of a figure depends on
the page around it. The same drawing gives the same text, whatever the user's matplotlibrc says.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from memguard.reporting.curves import CONTROLS_TIER

INK, CONTROL = "#010203", "#040506"
# Viridis by tier, the higher the further from the paper: dark on white, light on black; cut where contrast falls below 3.8:1.
_LIGHT_RANGE, _DARK_RANGE = (0.5, 0.0), (0.5, 1.0)
_SETTINGS = {"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "memguard"}
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def tier_colour(tier: int, tiers: Sequence[int]) -> str:
    """The placeholder that stands for the colour of a tier."""
    return CONTROL if tier == CONTROLS_TIER else f"#07{tiers.index(tier):04x}"


@contextmanager
def drawing_settings() -> Iterator[None]:
    """matplotlib's defaults with ours on top, put back afterwards."""
    from matplotlib import style

    with style.context(["default", _SETTINGS]):
        yield


def new_axes(*, ylabel: str = "exposure (bits)") -> Any:
    """Axes of a new transparent figure, in ink, with room for labels on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2))
    figure.patch.set_visible(False)
    axes = figure.add_axes((0.075, 0.135, 0.79, 0.835))
    axes.patch.set_visible(False)
    axes.set_ylabel(ylabel, color=INK)
    axes.xaxis.label.set_color(INK)
    axes.tick_params(colors=INK, length=3)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    return axes


def write_svg(axes: Any, *, name: str, tiers: Sequence[int], description: str) -> str:
    """The figure of `axes` as an `<svg>` element.

    Args:
        axes: from `new_axes`, drawn with `INK`, `CONTROL` and `tier_colour`.
        name: prefix of every id, so that two figures can stand in one page.
        tiers: the tiers drawn, lowest first.
        description: what a reader who cannot see it should be told.
    """
    buffer = io.StringIO()
    axes.figure.savefig(buffer, format="svg", metadata=_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].rstrip()
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"(?s)<style[^>]*>.*?</style>", lambda _: f"<style>{_style(name, tiers)}</style>", text, count=1)
    for placeholder, variable in _variables(tiers):
        text = text.replace(placeholder, f"var(--mg-{variable})")
    return text.replace("<svg", f'<svg class="memguard-{name}" role="img" aria-label="{escape(description)}"', 1)


def _variables(tiers: Sequence[int]) -> list[tuple[str, str]]:
    named = [(tier_colour(tier, tiers), f"tier-{tier}") for tier in tiers if tier != CONTROLS_TIER]
    return [(INK, "ink"), (CONTROL, "control"), *named]


def _style(name: str, tiers: Sequence[int]) -> str:
    root = f".memguard-{name}"
    light = _declare([("ink", "#24292f"), ("control", "#6e7781"), *_palette(tiers, _LIGHT_RANGE)])
    dark = _declare([("ink", "#d7dce2"), ("control", "#9aa4af"), *_palette(tiers, _DARK_RANGE)])
    return (
        f"{root} *{{stroke-linejoin:round;stroke-linecap:butt}}{root}{{{light}}}"
        f"@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}@media print{{{root}{{{light}}}}}"
    )


def _declare(pairs: Iterable[tuple[str, str]]) -> str:
    return ";".join(f"--mg-{variable}:{colour}" for variable, colour in pairs)


def _palette(tiers: Sequence[int], ends: tuple[float, float]) -> list[tuple[str, str]]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    inserted = [tier for tier in tiers if tier != CONTROLS_TIER]
    start, stop = ends
    step = (stop - start) / max(1, len(inserted) - 1)
    first = start if len(inserted) > 1 else (start + stop) / 2
    return [(f"tier-{tier}", to_hex(colormaps["viridis"](first + step * index))) for index, tier in enumerate(inserted)]
