"""The frame of a report: one HTML file without external resources, light or dark, for widths from 360 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--page:#fbfbf9;--card:#fff;--ink:#1d2126;--soft:#5b636d;--rule:#e0e2e0;
--hue-0:#1d2126;--hue-1:#2f6fde;--hue-2:#d4600c;--hue-3:#12875a;
--hue-4:#8b4bd1;--hue-5:#c8334d;--hue-6:#0c8598;--hue-7:#8a6d00}
@media (prefers-color-scheme:dark){:root{--page:#15181c;--card:#1c2025;--ink:#e6e8ea;--soft:#9aa3ad;--rule:#333a42;
--hue-0:#f0f1f2;--hue-1:#6aa5ff;--hue-2:#ff9a4d;--hue-3:#46c995;
--hue-4:#bd8dff;--hue-5:#ff7186;--hue-6:#45c4d8;--hue-7:#d8b93a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:27px;line-height:1.2;margin:0 0 8px}h2{font-size:19px;margin:40px 0 12px}
h3{font-size:16px;margin:24px 0 6px}details{margin:10px 0}summary{cursor:pointer;color:var(--soft)}
p{margin:8px 0;max-width:76ch}.soft,.empty{color:var(--soft);font-size:14px}
table{border-collapse:collapse;width:100%;font-size:15px;font-variant-numeric:tabular-nums}
th,td{padding:8px 10px;border-bottom:1px solid var(--rule);text-align:right;vertical-align:bottom}
th{font-weight:600;font-size:13px;line-height:1.3}th small{display:block;font-weight:400;color:var(--soft)}
th:first-child,td:first-child{text-align:left;padding-left:0}td small{color:var(--soft);white-space:nowrap}
.scroll{overflow-x:auto}
.pairs td{padding:4px 10px;vertical-align:top;text-align:left;overflow-wrap:anywhere}
.pairs td:first-child{padding-left:0;color:var(--soft);width:34%}
figure{margin:0 0 18px;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px}
svg{display:block;width:100%;height:auto}svg text{font:13px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--rule)}.zero,.axis,.tick{stroke:var(--soft)}.zero{stroke-dasharray:4 3}
.curve,.faint{fill:none;stroke-width:2;stroke-linejoin:round}.faint{stroke-width:1;opacity:.3}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 8px;padding:0;list-style:none;font-size:14px}
.dot{display:inline-block;width:11px;height:11px;border-radius:50%;margin-right:7px}
pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px;font-size:14px;
white-space:pre-wrap;overflow-wrap:anywhere}
.narrow{display:none}
th[aria-sort]{cursor:pointer}th[aria-sort]:focus-visible{outline:2px solid var(--hue-1)}
th[aria-sort=ascending]::after{content:" ↑"}th[aria-sort=descending]::after{content:" ↓"}
td.said,th.said{text-align:left;max-width:46ch}.sortable td:first-child{white-space:nowrap}
.dense{font-size:14px}.dense th,.dense td{padding:6px 4px}
.bad{color:var(--hue-5);font-weight:600}
@media (max-width:640px){
main{padding:20px 14px 48px}h1{font-size:23px}figure{padding:10px 8px}
.wide{display:none}.narrow{display:block}
.rows thead{display:none}
.rows tr{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);
gap:2px 20px;padding:12px 0;border-bottom:1px solid var(--rule)}
.rows td{display:flex;justify-content:space-between;gap:8px;padding:0;border:0}
.rows td::before{content:attr(data-label);color:var(--soft);font-size:13px}
.rows td.said,.rows td.long{grid-column:1/3}.rows td.said span{flex:1}.rows td::before{text-align:left}
.rows td:first-child{grid-column:1/3;font-weight:600;justify-content:start;align-items:center;
white-space:normal;overflow-wrap:anywhere}
.rows td:first-child::before{display:none}.rows td:first-child .dot{margin-right:0}}
"""

# Click, Enter or space on a heading sorts its table: numbers by data-value, the rest by their text.
SORT = """
for(const table of document.querySelectorAll("table.sortable")){
const heads=[...table.querySelectorAll("th")];
heads.forEach((head,i)=>{head.tabIndex=0;head.setAttribute("aria-sort","none");
const sort=()=>{const up=head.getAttribute("aria-sort")==="descending";
heads.forEach(h=>h.setAttribute("aria-sort","none"));
head.setAttribute("aria-sort",up?"ascending":"descending");
const key=row=>{const cell=row.cells[i],v=cell.dataset.value;return v===undefined?cell.textContent:+v};
[...table.tBodies[0].rows].sort((a,b)=>{const x=key(a),y=key(b);
return (x<y?-1:x>y?1:0)*(up?1:-1)}).forEach(row=>table.tBodies[0].append(row))};
head.addEventListener("click",sort);
head.addEventListener("keydown",e=>{if(e.key==="Enter"||e.key===" "){e.preventDefault();sort()}})})}
"""


Cell = str | tuple[str, float] | tuple[str, float, bool]  # of a table; see there
LONG, PROSE = 14, 40  # longer cells fill a narrow page's width; columns with longer ones are left-aligned


def page(title: str, parts: list[str]) -> str:
    """The HTML file. `parts` are HTML, `title` is text."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    sort = f"<script>{SORT}</script>" if any("sortable" in part for part in parts) else ""
    body = f"<main>{''.join(parts)}</main>{sort}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def soft(text: str) -> str:
    """A paragraph of small text."""
    return f'<p class="soft">{escape(text)}</p>'


def pairs(values: dict) -> str:
    """A table of names and values."""
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in values.items())
    return f'<table class="pairs"><tbody>{rows}</tbody></table>'


def table(headings: list[tuple[str, str]], rows: Sequence[Sequence[Cell]], dots: list[int] | None = None) -> str:
    """A sortable table that becomes a list of cards on a narrow page.

    Args:
        headings: (name, unit) of each column.
        rows: rows of cells: text, (text, number to sort by), or (text, number, whether it is highlighted).
        dots: the hue of a dot before the first cell of each row.
    """
    longest = [max((len(_text(row[j])) for row in rows), default=0) for j in range(len(headings))]
    kinds = ["said" if j and n > PROSE else "long" if j and n > LONG else "" for j, n in enumerate(longest)]
    head = "".join(
        f'<th class="{kind}">{escape(name)}<small>{escape(unit)}</small></th>'
        for kind, (name, unit) in zip(kinds, headings, strict=True)
    )
    body = []
    for i, row in enumerate(rows):
        cells = []
        for j, ((name, unit), cell) in enumerate(zip(headings, row, strict=True)):
            _, value, bad = (cell, None, False) if isinstance(cell, str) else (*cell, False)[:3]
            label = f"{name}, {unit}" if unit else name
            sort = "" if value is None else f' data-value="{value!r}"'
            mark = dot(dots[i]) if dots and j == 0 else ""
            text = escape(_text(cell)).replace("/", "/<wbr>")  # a long name breaks there
            shown = f"<span{' class=bad' if bad else ''}>{text}</span>"
            cells.append(f'<td class="{kinds[j]}" data-label="{escape(label)}"{sort}>{mark}{shown}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    dense = " dense" if len(headings) > 8 else ""
    return f'<div class="scroll"><table class="rows sortable{dense}">{inside}</table></div>'


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def figure(charts: tuple[str, str], legend: list[tuple[int, str]]) -> str:
    """A (wide, narrow) pair of charts, of which the page shows the one that fits, with a legend (hue, name)."""
    wide, narrow = charts
    items = "".join(f"<li>{dot(hue)}{escape(name)}</li>" for hue, name in legend)
    both = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
    return f'<figure><ul class="legend">{items}</ul>{both}</figure>'


def dot(hue: int) -> str:
    """A dot in the colour of a curve."""
    return f'<span class="dot" style="background:var(--hue-{hue})"></span>'
