"""Pages in HTML with tables and plots, which open offline: a page has all that it needs inside.

The plots are drawn by uPlot (lmi_server/plots/static/uPlot.iife.min.js, MIT licence in uPlot.LICENSE beside it).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from typing import Literal, NamedTuple

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first column has the names of the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """Series over the same ascending x; None is no point."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    series: Sequence[tuple[str, Values]]
    style: Literal["lines", "points", "both"] = "lines"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page. `code` is text that keeps its lines."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    code: str = ""


class Points(NamedTuple):
    """What a plot of points is made of."""

    x: list[float]
    series: list[tuple[str, Values]]


def scatter(points: Mapping[str, Sequence[tuple[float, float]]]) -> Points:
    """Return x and series of points; each series has its own x."""
    places = sorted((x, y, name) for name, pairs in points.items() for x, y in pairs)
    series: list[tuple[str, Values]] = [
        (name, [y if name == owner else None for _, y, owner in places]) for name in points
    ]
    return Points([x for x, _, _ in places], series)


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page."""
    plots = [plot for section in sections for plot in section.plots]
    numbers = {id(plot): number for number, plot in enumerate(plots)}
    body = "".join(_section(section, numbers) for section in sections)
    data = json.dumps([asdict(plot) for plot in plots], allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_plots('uPlot.min.css')}\n{_static('page.css')}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>{body}"
        f"<footer>Plots by uPlot. {escape(_plots('uPlot.LICENSE'))}</footer>\n"
        f'<script type="application/json" id="plots">{data}</script>\n'
        f"<script>{_plots('language.js')}</script><script>{_plots('uPlot.iife.min.js')}</script>\n"
        f"<script>{_static('page.js')}</script></body></html>\n"
    )


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Return the same in Markdown, without the plots."""
    return "\n\n".join([f"# {title}", *(part for section in sections for part in _markdown_parts(section))]) + "\n"


def _markdown_parts(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield from section.text
    for table in section.tables:
        rule = ["---", *("---:" for _ in table.columns[1:])]
        lines = [table.columns, rule, *table.rows]
        yield "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    if section.code:
        yield f"```\n{section.code.rstrip()}\n```"


def _static(name: str) -> str:
    return files("lmi_server.bench").joinpath("static", name).read_text(encoding="utf-8")


def _plots(name: str) -> str:
    return files("lmi_server.plots").joinpath("static", name).read_text(encoding="utf-8")


def _section(section: Section, numbers: Mapping[int, int]) -> str:
    text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in section.text)
    tables = "".join(map(_table, section.tables))
    figures = "".join(_figure(plot, numbers[id(plot)]) for plot in section.plots)
    code = f"<pre>{escape(section.code)}</pre>" if section.code else ""
    plots = f'<div class="plots">{figures}</div>' if figures else ""
    return f"<section><h2>{escape(section.title)}</h2>{text}{tables}{code}{plots}</section>\n"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(_row(row) for row in table.rows)
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n'


def _row(row: Sequence[str]) -> str:
    name, *cells = row
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>\n'


def _figure(plot: Plot, number: int) -> str:
    return f'<figure data-plot="{number}"><figcaption>{escape(plot.title)}</figcaption></figure>\n'
