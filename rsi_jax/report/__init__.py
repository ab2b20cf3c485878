"""The report of a run: one self-contained HTML page with curves, credit heat maps, config, code revision and cost."""

from rsi_jax.report.curves import Series
from rsi_jax.report.heatmap import TraceInsert, TraceSegment, TraceTokens, trace
from rsi_jax.report.page import REPORT_FILE, SummaryRow, write_report
from rsi_jax.report.provenance import environment

__all__ = [
    "REPORT_FILE",
    "Series",
    "SummaryRow",
    "TraceInsert",
    "TraceSegment",
    "TraceTokens",
    "environment",
    "trace",
    "write_report",
]
