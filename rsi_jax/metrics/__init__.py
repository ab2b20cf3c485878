"""What a run tells people and machines: metrics, progress, the compute ledger, the final table and JSON line."""

from rsi_jax.metrics.console import Progress, duration, finish, jsonable, number, table
from rsi_jax.metrics.ledger import Ledger
from rsi_jax.metrics.tracker import (
    EVENTS_FOLDER,
    METRICS_FILE,
    TIME_PREFIX,
    Adapter,
    Resumed,
    Tracker,
    adapter,
    read_lines,
    without_time,
)

__all__ = [
    "EVENTS_FOLDER",
    "METRICS_FILE",
    "TIME_PREFIX",
    "Adapter",
    "Ledger",
    "Progress",
    "Resumed",
    "Tracker",
    "adapter",
    "duration",
    "finish",
    "jsonable",
    "number",
    "read_lines",
    "table",
    "without_time",
]
