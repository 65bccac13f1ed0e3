"""One self-contained page: no script, no font, no picture from anywhere else, so that it opens offline and in a mail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_CSS = """
:root{--ink:#1f2933;--muted:#66727f;--line:#e4e8ed;--soft:#f6f8fa;--blue:#2458c5;--red:#d1293d;--amber:#b45309;--green:#0f8a5f}
*{box-sizing:border-box}
body{margin:0;background:#eef1f5;color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 56px}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:6px 14px;margin:4px 2px 14px}
h1{font-size:26px;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 12px}
.sub{color:var(--muted);flex-basis:100%}
.chip{font-size:13px;font-weight:600;border-radius:99px;padding:2px 11px;color:#fff;background:var(--muted)}
.done{background:var(--green)}.stopped,.failed,.missing{background:var(--red)}.preempted{background:var(--amber)}.running{background:var(--blue)}
section{background:#fff;border:1px solid var(--line);border-radius:12px;padding:18px 20px;margin-top:16px;box-shadow:0 1px 2px rgba(31,41,51,.05)}
.tiles{display:flex;flex-wrap:wrap;gap:12px;padding:0;border:0;background:none;box-shadow:none}
.tile{flex:1 1 auto;min-width:112px;background:#fff;border:1px solid var(--line);border-radius:12px;padding:12px 14px}
.tile b{display:block;white-space:nowrap;font-size:20px;font-weight:650;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.tile span{color:var(--muted);font-size:13px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--muted);font-weight:600;font-size:13px;border-bottom:1px solid #c5ccd4;padding:6px 14px 6px 0;white-space:nowrap}
td{border-bottom:1px solid var(--line);padding:7px 14px 7px 0;vertical-align:top}
tr:last-child td{border-bottom:0}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.badge{display:inline-block;min-width:22px;text-align:center;border-radius:6px;padding:1px 6px;font-size:12px;font-weight:700;color:#fff;background:var(--red)}
.action{font-weight:600}.rollback{color:var(--amber)}.skip,.stop{color:var(--red)}
.note{color:var(--muted);font-size:13px}
.best td{background:#f0f7f4}
svg{width:100%;height:auto;display:block}
details{margin-top:4px}summary{cursor:pointer;font-weight:600}
pre{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:12px;overflow-x:auto;font-size:12.5px;line-height:1.45}
ul{margin:0;padding-left:20px}
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML document. `body`: markup, already escaped."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def header(title: str, subtitle: str, status: str | None = None) -> str:
    chip = f'<span class="chip {escape(status)}">{escape(status)}</span>' if status else ""
    return f'<header><h1>{escape(title)}</h1>{chip}<div class="sub">{escape(subtitle)}</div></header>'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """(name, value) pairs as a row of figures."""
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in values
    )
    return f'<section class="tiles">{cells}</section>'


def section(title: str, *content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(content)}</section>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Iterable[int] = (), best: int | None = None
) -> str:
    """`rows`: cells of markup, already escaped. numeric: columns set flush right. best: the row to tint."""
    right = set(numeric)
    kinds = [' class="num"' if i in right else "" for i in range(len(head))]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(head, kinds, strict=True))
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True))
        lines.append(f"<tr{' class=best' if index == best else ''}>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def folded(title: str, text: str) -> str:
    """Long plain text behind a line that opens it."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def text(value: Any) -> str:
    """A value as a person writes it, escaped."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return escape(", ".join(str(v) for v in value)) or "-"
    return escape(f"{value:g}" if isinstance(value, float) else str(value))
