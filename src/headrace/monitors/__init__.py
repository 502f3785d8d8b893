"""What is seen of a run: metrics, console, JSON Lines, rollouts, and the report made from them.

Every monitor watches and changes nothing. Torch-free.
"""

from headrace.monitors.alarms import Alarms, canary_metrics
from headrace.monitors.console import LiveMonitor, PlainMonitor, console_monitor
from headrace.monitors.fanout import FanoutMonitor
from headrace.monitors.inspect import inspect_view
from headrace.monitors.jsonl import JsonlMonitor
from headrace.monitors.loop_lag import LoopLag
from headrace.monitors.metrics import (
    EvaluationMode,
    Metrics,
    evaluation_metrics,
    rollout_metrics,
    unbiased_pass_at_k,
)
from headrace.monitors.report import write_report
from headrace.monitors.rollout_monitor import RolloutMonitor
from headrace.monitors.rollouts import read_rollouts, write_rollouts
from headrace.monitors.run_directory import RunHistory, read_run, rewind
from headrace.monitors.step_records import (
    Facts,
    RecordedStep,
    Weights,
    read_batch,
    read_records,
)
from headrace.monitors.summary import summarise

__all__ = [
    "Alarms",
    "EvaluationMode",
    "Facts",
    "FanoutMonitor",
    "JsonlMonitor",
    "LiveMonitor",
    "LoopLag",
    "Metrics",
    "PlainMonitor",
    "RecordedStep",
    "RolloutMonitor",
    "RunHistory",
    "Weights",
    "canary_metrics",
    "console_monitor",
    "evaluation_metrics",
    "inspect_view",
    "read_batch",
    "read_records",
    "read_rollouts",
    "read_run",
    "rewind",
    "rollout_metrics",
    "summarise",
    "unbiased_pass_at_k",
    "write_report",
    "write_rollouts",
]
