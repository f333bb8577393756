"""Numbers as people read them: three significant digits, thousands separators, words where nothing was measured.

Rounding is for the eye only; the JSON report holds the full figures.
"""

from __future__ import annotations

import math
import re

NOT_MEASURED = "not measured"
LARGEST_PLAIN_COUNT = 10_000_000
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def show_number(value: float | int | None, *, missing: str = NOT_MEASURED) -> str:
    """A figure to three significant digits; `missing` for None, never 0.

    Example:
        >>> show_number(1234.5), show_number(0.05), show_number(1.2e-7), show_number(None)
        ('1,234', '0.0500', '1.20×10⁻⁷', 'not measured')
    """
    if value is None:
        return missing
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")
    exponent = math.floor(math.log10(abs(rounded)))
    if exponent < -3 or exponent > 6:
        return _scientific(value)
    text = f"{value:,.0f}" if exponent > 2 else f"{rounded:.{2 - exponent}f}"
    return text.replace("-", "−")


def _scientific(value: float | int) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.replace('-', '−')}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def show_count(value: int | None, *, missing: str = NOT_MEASURED) -> str:
    """An exact count with thousands separators.

    Example:
        >>> show_count(1000000000)
        '1,000,000,000'
    """
    return missing if value is None else f"{value:,}"


def show_rank(low: int | None, high: int | None) -> str:
    """The ranks that the evidence allows; exact up to ten million, three digits above.

    Example:
        >>> show_rank(1, 1), show_rank(3, 10**9)
        ('1', '3 to 1.00×10⁹')
    """
    if low is None or high is None:
        return NOT_MEASURED
    return " to ".join(_short_count(end) for end in dict.fromkeys((low, high)))


def show_size(value: int) -> str:
    """The size of a secret space, with its bits; exact up to ten million, three digits above.

    Example:
        >>> show_size(10**6), show_size(16**32)
        ('1,000,000 (19.9 bits)', '3.40×10³⁸ (128 bits)')
    """
    return f"{_short_count(value)} ({show_number(math.log2(value))} bits)"


def _short_count(value: int) -> str:
    return show_count(value) if value < LARGEST_PLAIN_COUNT else _scientific(value)


def show_percent(share: float | None, *, missing: str = NOT_MEASURED) -> str:
    """A share of 0..1 as a percentage; what is not all is never rounded to 100%.

    Example:
        >>> show_percent(0.00042), show_percent(0.99997), show_percent(1.0)
        ('0.0420%', 'over 99.9%', '100%')
    """
    if share is None:
        return missing
    return "over 99.9%" if 0.9995 <= share < 1 else f"{show_number(100 * share)}%"


def show_level(confidence: float) -> str:
    """A confidence of 0..1 as people write it.

    Example:
        >>> show_level(0.95), show_level(0.96875), show_level(0.99999)
        ('95%', '96.9%', 'over 99.9%')
    """
    return re.sub(r"\.0+%$", "%", show_percent(confidence))


def show_share_interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval of a share of 0..1, as percentages.

    Example:
        >>> show_share_interval(0.031, 1.0), show_share_interval(None, None)
        ('3.10% to 100%', 'no interval')
    """
    return "no interval" if low is None or high is None else f"{show_percent(low)} to {show_percent(high)}"


def show_tries(log10_tries: float | None) -> str:
    """A mean number of tries from its base-10 logarithm; None: it would take for ever.

    Example:
        >>> show_tries(0.04), show_tries(3.21), show_tries(None)
        ('1.1 tries', '10^3.2 tries', 'never')
    """
    if log10_tries is None:
        return "never"
    return f"{10**log10_tries:.1f} tries" if log10_tries < 1 else f"10^{log10_tries:.1f} tries"


def show_interval(low: float | None, high: float | None, *, missing: str = "no interval") -> str:
    """Both ends of an interval in words; an open end is named.

    Example:
        >>> show_interval(1.0, 2.5), show_interval(None, None), show_interval(-3.0, None)
        ('1.00 to 2.50', 'no interval', '−3.00 to no upper bound')
    """
    if low is None and high is None:
        return missing
    return f"{show_number(low, missing='no lower bound')} to {show_number(high, missing='no upper bound')}"


def show_value(value: float | int | str | None) -> str:
    """A figure of a rule: an integer exactly, a float to three digits, text as it is.

    Example:
        >>> show_value(12345), show_value(0.25), show_value("max"), show_value(None)
        ('12,345', '0.250', 'max', 'not measured')
    """
    if isinstance(value, str):
        return value
    return show_count(value) if isinstance(value, int) else show_number(value)


def show_yes_no(value: bool) -> str:
    """yes or no."""
    return "yes" if value else "no"
