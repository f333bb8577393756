"""The report page in a real browser: it draws without a network, and nothing reaches over the edge."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_reporting_samples import make_full_report, make_report

from memguard.reporting.html import render_html

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--virtual-time-budget=2000",
]
PROBE = """<script>addEventListener('load', () => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const drawn = [...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().height > 50).length;
  const asked = performance.getEntriesByType('resource').length;
  document.title = `probe wide=${wide} drawn=${drawn} asked=${asked}`;
});</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize(("make", "figures"), [(make_report, 2), (make_full_report, 3)])
def test_a_browser_draws_the_page_without_a_network_or_overflow(make: Any, figures: int, width: int, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        if os.environ.get("MEMGUARD_NEED_BROWSER"):
            pytest.fail("MEMGUARD_NEED_BROWSER is set and no chromium was found.")
        pytest.skip("no chromium on this machine")
    page = tmp_path / "report.html"
    page.write_text(render_html(make()).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    profile = tmp_path / "profile"
    command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},2000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>probe wide=(-?\d+) drawn=(\d+) asked=(\d+)</title>", done.stdout)
    assert found, done.stdout[:500] + done.stderr[-2000:]
    wide, drawn, asked = map(int, found.groups())
    assert wide <= 0
    assert drawn == figures
    assert asked == 0
