"""What a run leaves behind and shows: metrics, samples, result, report page, progress. Knows no trainer."""

from toolkit.reports.judged import ERRORS_FILE, SCORES_FILE, JudgedPair, judgement, worst_errors
from toolkit.reports.metrics import MetricsFile, read_jsonl_metrics
from toolkit.reports.page import write_report
from toolkit.reports.progress import ProgressBar
from toolkit.reports.result import (
    RESULT_FILE,
    peak_memory_gb,
    read_json,
    read_result,
    versions,
    write_json,
    write_result,
)
from toolkit.reports.samples import Answers, append_jsonl, keep_until, sample_rows, samples_table, write_jsonl

__all__ = [
    "ERRORS_FILE",
    "RESULT_FILE",
    "SCORES_FILE",
    "Answers",
    "JudgedPair",
    "MetricsFile",
    "ProgressBar",
    "append_jsonl",
    "judgement",
    "keep_until",
    "peak_memory_gb",
    "read_json",
    "read_jsonl_metrics",
    "read_result",
    "sample_rows",
    "samples_table",
    "versions",
    "worst_errors",
    "write_json",
    "write_jsonl",
    "write_report",
    "write_result",
]
