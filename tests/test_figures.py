"""Figures in words: one wording for text and notebooks."""

from __future__ import annotations

import html
import re

from llmbatch import Report
from llmbatch.figures import Figures

REPORT = Report(
    rows=1200, errors=2, duplicates=3, input_tokens=5000, cached_tokens=1000, output_tokens=4000, load_seconds=0.5,
    seconds=2.0, prefix_sharing=0.2, prefix_sharing_optimal=0.25, preemptions=0, steps=7, order="blend",
    reason="rows share prefixes", order_gain=None, model="m", dtype="float32", kv_memory=1, rows_resumed=4,
    notes=("answers end after <512> tokens & no more",), output="/data/out",
)  # fmt: skip  # figures in groups


def cells(figures: Figures) -> list[tuple[str, str]]:
    """The rows of the table that a notebook shows."""
    shown = figures._repr_html_()
    assert shown.startswith("<table>")
    assert shown.endswith("</table>")
    found = re.findall(r"<tr><th[^>]*>(.*?)</th><td[^>]*>(.*?)</td></tr>", shown)
    assert "".join(f"{name}{words}" for name, words in found) == re.sub(r"<[^>]*>", "", shown)
    return [(html.unescape(name), html.unescape(words)) for name, words in found]


def test_a_report_says_its_figures_in_lines() -> None:
    assert REPORT.to_text().splitlines() == [
        "rows             1,200 (2 errors, 3 duplicates, 4 found answered)",
        "tokens           5,000 in, 4,000 out",
        "speed            4,500 tokens/s over 2.0 s",
        "loading          0.5 s before that",
        "prefix sharing   20.0% of 25.0% possible",
        "order            blend: rows share prefixes",
        "output           /data/out",
        "note             answers end after <512> tokens & no more",
    ]


def test_a_notebook_shows_what_the_lines_say() -> None:
    assert [f"{name:<16} {words}" for name, words in cells(REPORT)] == REPORT.to_text().splitlines()


def test_the_first_error_is_said_where_there_is_one() -> None:
    report = Report.from_dict({**REPORT.to_dict(), "first_error": "row 3: prompt is null"})
    assert ("first error", "row 3: prompt is null") in cells(report)


def test_what_order_bought_is_said_where_it_is_known() -> None:
    report = Report.from_dict({**REPORT.to_dict(), "order_gain": 1.634})
    assert ("order bought", "1.63 x over the input's order, simulated with these answers") in cells(report)
