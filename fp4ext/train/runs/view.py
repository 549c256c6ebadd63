"""What a job shows of itself, as data: while it runs, in the table at the end, and in the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Metrics = list[dict]  # lines of metrics.jsonl
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Column:
    """A column of the table of results.

    Attributes:
        name, unit: its heading in the report.
        short: its heading on a terminal, of one or two lines.
        cell: a row → text.
        there: whether a result has this column.
    """

    name: str
    unit: str
    short: str
    cell: Callable[[object], str]
    there: Callable[[object], bool] = lambda result: True


@dataclass(frozen=True)
class Curve:
    """A figure of the report, with a curve for each arm.

    Attributes:
        label, unit: of the vertical axis.
        draw: (lines of one arm, lines of the arm "bf16" or None, config.json's run) → its curves. The last of them is
            drawn strongly, those before it faintly. A figure without a point is left out.
        heading: above the figure; "": it belongs to the one before.
        zero: the axis includes 0.
        late: the axis ends at the largest value after the first tenth of the run.
        remark: below the figure.
    """

    label: str
    unit: str
    draw: Callable[[Metrics, Metrics | None, dict], list[Points]]
    heading: str = ""
    zero: bool = False
    late: bool = False
    remark: str = ""


@dataclass(frozen=True)
class View:
    """What one job shows.

    Attributes:
        key: what a line of metrics calls its arm by.
        evaluated: the measure that only the lines of evaluations have.
        line: (the lines of all arms) → a step in words.
        smoothed, memory: measures that the live table shows as a running mean, and the share of the old mean in it.
        newest, largest: measures of which the live table shows the newest value, and the largest.
        live: (heading, (name of an arm, its measures, those of all arms) → text) of each column of the live table.
        columns: of the table of results.
        remarks: (result) → lines below that table on a terminal.
        title, said: (config.json) → the report's title, and what the run was.
        summary: (result) → what it found.
        about: how to read the table.
        curves: of the report. picture: those that loss.png has, where matplotlib is installed.
        left: (result) → names and values of a last section, "What is not quantized".
    """

    key: str
    evaluated: str
    line: Callable[[list[dict]], str]
    smoothed: tuple[str, ...]
    memory: float
    newest: tuple[str, ...]
    live: tuple[tuple[str, Callable[[str, dict, dict], str]], ...]
    columns: tuple[Column, ...]
    title: Callable[[dict], str]
    said: Callable[[dict], str]
    summary: Callable[[object], str]
    about: str
    curves: tuple[Curve, ...]
    largest: tuple[str, ...] = ()
    picture: tuple[Curve, ...] = ()
    remarks: Callable[[object], list[str]] = lambda result: []
    left: Callable[[object], dict] = lambda result: {}


def measured(key: str, lines: Metrics) -> Points:
    """(step, value) of a measure, where it is there."""
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def smooth(points: Points, width: int) -> Points:
    """The mean of each `width` points in a row, at the last of them."""
    ends = range(width, len(points) + 1)
    return [(points[i - 1][0], sum(y for _, y in points[i - width : i]) / width) for i in ends]
