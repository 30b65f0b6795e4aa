"""What graph trees do with each report's program, as the reports say; and the page that says it."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import HOSTCUDA
from reports import PAGE, Report, page, reports, seen_with_trees

SEEN_WITH = "2.14.1"
_seen = functools.cache(seen_with_trees)


def test_the_page_is_up_to_date() -> None:
    """``python tests/reported/reports.py`` writes it."""
    assert PAGE.read_text() == page()


def test_a_report_has_one_row() -> None:
    numbers = [one.number for one in reports()]
    assert len(numbers) == len(set(numbers)) >= 25


@pytest.mark.gpu
@pytest.mark.skipif(
    not HOSTCUDA or not torch.__version__.startswith(SEEN_WITH), reason="seen there, and nowhere else"
)
@pytest.mark.parametrize("report", reports(), ids=lambda one: str(one.number))
def test_what_graph_trees_do(report: Report) -> None:
    assert _seen()[report.number].startswith(report.seen)
