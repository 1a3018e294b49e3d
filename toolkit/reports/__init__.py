"""What a run leaves behind and shows: metrics, samples, result, report page, progress. Knows no trainer."""

from toolkit.reports.comparison import ComparedRun, comparison_page
from toolkit.reports.evaluated import APART, at_start, is_number, of_evaluation, of_steps
from toolkit.reports.files import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    WARNINGS_FILE,
    MetricsFile,
    append_jsonl,
    count_lines,
    iter_jsonl,
    keep_lines,
    keep_until,
    memory_in_words,
    peak_memory_gb,
    read_json,
    read_jsonl,
    read_result,
    versions,
    write_json,
    write_jsonl,
    write_result,
)
from toolkit.reports.machine import device_in_words, environment, machine
from toolkit.reports.page import RELOADS_AFTER, REPORT_FILE, write_report
from toolkit.reports.pairs import ERRORS_FILE, SCORES_FILE, ScoredPair, of_responses, pair_evaluation, worst_errors
from toolkit.reports.progress import Progress, figures_of
from toolkit.reports.samples import Output, Responses, sample_rows, samples_table, texts_table
from toolkit.reports.verdict import verdict
