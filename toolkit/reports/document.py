"""A self-contained HTML page and its tables, whatever is on them. It loads nothing from anywhere.

Whatever a model, a file or a recipe says is text in it; the page's own script, which sorts tables, is the only one that
a browser may run there, by its hash.
"""

import base64
import hashlib
import html
import math
from collections.abc import Collection, Iterable, Sequence

from toolkit.errors import printable
from toolkit.reports.charts import COLOURS

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d5dae0; --back: #fff; --box: #f5f7f9;
  --s0: #0a62c9; --s1: #c2410c; --s2: #1a7f37; --s3: #8250df; --s4: #b5179e; --s5: #57606a; --warn: #9a6700;
  --warn-box: #fff6dd }
@media (prefers-color-scheme: dark) { :root { --text: #e3e8ee; --soft: #9aa5b1; --line: #363d47; --back: #12161b;
  --box: #1b2027; --s0: #6cb0ff; --s1: #ff9a5c; --s2: #57d17c; --s3: #bd9bff; --s4: #ff7ac8; --s5: #a9b3bd;
  --warn: #e8b84b; --warn-box: #2c2612 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 0 auto; padding: 1.2rem clamp(.8rem, 3vw, 2rem);
  color: var(--text); background: var(--back) }
h1 { margin: .2rem 0; font-size: 1.5rem } h2 { margin: 2rem 0 .4rem; font-size: 1.15rem }
body { overflow-wrap: anywhere } p { margin: .3rem 0; max-width: 50rem } .soft, small, caption { color: var(--soft) }
.verdict { font-size: 1.1rem; font-weight: 600; max-width: none }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: .6rem 0 } caption { text-align: left; padding: .2rem 0 }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: left; vertical-align: top }
td { white-space: pre-wrap; min-width: 4rem; unicode-bidi: plaintext }
table:not(.text) td:first-child:not(:last-child) { min-width: 9rem; overflow-wrap: break-word }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0; cursor: pointer }
th button::after { content: " \\2195"; color: var(--soft) }
summary { cursor: pointer; color: var(--soft) }
table.text { width: 100% } table.text td:not(.n) { min-width: 12rem }
td.share { width: 12rem } td.share svg { width: 100%; height: .6rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: .6rem 1.2rem }
figure { margin: 0; min-width: 0 }
figcaption { font-weight: 600; font-size: .85rem } figure svg { width: 100%; height: auto }
.legend span { margin-left: .8rem; font-weight: 400; color: var(--c) }
.legend .again { text-decoration: underline dashed } .line.again { stroke-dasharray: 5 3 }
.tick { font-size: 10px; fill: var(--soft) } .end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--line); stroke-width: .6 }
.mark { stroke: var(--warn); stroke-width: 1.2; stroke-dasharray: 3 2; fill: none }
.line { fill: none; stroke-width: 1.5 } .thin { stroke-width: .6; opacity: .5 }
.line { stroke: var(--c) } .dot, .bar, .band { fill: var(--c) }
.band { opacity: .22 } .bar { opacity: .6 } .dot { opacity: .75 }
.warnings { background: var(--warn-box); border-left: 3px solid var(--warn); padding: .4rem .8rem; margin: .6rem 0 }
pre { background: var(--box); padding: .8rem; overflow: auto; font-size: .85rem }
""" + "".join(f".s{i} {{ --c: var(--s{i}) }}\n" for i in range(COLOURS))
_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const th = button.parentElement, place = th.cellIndex, body = th.closest("table").tBodies[0];
  const rows = [...body.rows], up = th.dataset.up !== "1";
  const of = row => { const cell = row.cells[place]; return cell.dataset.v ?? cell.textContent };
  rows.sort((a, b) => { const x = of(a), y = of(b), n = Number(x) - Number(y);
    return (isNaN(n) ? x.localeCompare(y) : n) * (up ? 1 : -1) });
  th.dataset.up = up ? "1" : "0";
  body.append(...rows);
};
"""


def page(title: str, body: str, *, refresh: int = 0) -> str:
    """A whole page; with `refresh` it loads itself again after so many seconds."""
    own = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{body}<script>{_SCRIPT}</script></body></html>\n"
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Collection[int], sortable: bool = False
) -> str:
    """A table of escaped cells; `numbers` are the places of the columns that hold figures."""
    mark = dict.fromkeys(numbers, ' class="n"')
    names = (f"<button>{html.escape(name)}</button>" if sortable and name else html.escape(name) for name in columns)
    head = "".join(f"<th{mark.get(place, '')}>{name}</th>" for place, name in enumerate(names))
    lines = "".join(
        f"<tr>{''.join(_cell(value, mark.get(place, '')) for place, value in enumerate(row))}</tr>" for row in rows
    )
    kind = ' class="text"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(value: object, mark: str) -> str:
    # A number is sorted by itself, not by the form in which it is shown.
    own = f' data-v="{value!r}"' if isinstance(value, float) and math.isfinite(value) else ""
    text = html.escape(f"{value:.3f}" if isinstance(value, float) else printable(str(value)))
    return f"<td{mark}{own}>{text}</td>"
