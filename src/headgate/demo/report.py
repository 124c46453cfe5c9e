"""The report of the demonstration: one HTML page with plots, that needs nothing else.

Owns: how it looks. Does not own: what is in it (story).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 760, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 28
_COLOURS = ("#2f6fdb", "#d9822b", "#2a9d5c", "#a04bb5", "#c23b3b", "#3aa6b9")
_STYLE = """
:root{color-scheme:light dark;--ink:#1d2733;--soft:#647184;--line:#d8dee6;--page:#fff;--card:#f6f8fa;--good:#1f8a4c}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#93a1b1;--line:#344150;--page:#0f151c;--card:#18212b;--good:#4cc07f}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:820px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.05rem;margin:2rem 0 .4rem}
table{border-collapse:collapse;width:100%}td,th{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:left}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.6rem}
.card{background:var(--card);border-radius:8px;padding:.6rem .8rem}.card b{display:block;font-size:1.25rem}.card span{color:var(--soft)}
.held li::marker{content:"✓  ";color:var(--good)}
svg{width:100%;height:auto;background:var(--card);border-radius:8px}svg text{fill:var(--soft);font-size:11px}
svg .grid{stroke:var(--line)}svg .mark{stroke:var(--soft);stroke-dasharray:3 3}
.legend span{margin-right:1rem;white-space:nowrap}
.legend i{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin-right:.35em}
"""


@dataclass
class Plot:
    """Lines over seconds."""

    title: str
    unit: str
    lines: Mapping[str, Points]
    marks: Sequence[tuple[float, str]] = ()


@dataclass
class Page:
    """All that is told."""

    title: str
    about: str
    cards: list[tuple[str, str]] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = field(default_factory=list)
    """Title, columns, rows."""

    def html(self) -> str:
        parts = [f"<h1>{escape(self.title)}</h1><p>{escape(self.about)}</p>"]
        cards = "".join(f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in self.cards)
        parts.append(f'<div class="cards">{cards}</div>')
        if self.held:
            parts.append('<h2>What was checked</h2><ul class="held">' + "".join(f"<li>{escape(text)}</li>" for text in self.held) + "</ul>")
        parts += [_drawn(plot) for plot in self.plots]
        for title, columns, rows in self.tables:
            head = "".join(f'<th class="{_side(at)}">{escape(name)}</th>' for at, name in enumerate(columns))
            body = "".join(
                "<tr>" + "".join(f'<td class="{_side(at)}">{escape(v)}</td>' for at, v in enumerate(row)) + "</tr>" for row in rows
            )
            parts.append(f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table>")
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style>{''.join(parts)}</html>\n"
        )


def _side(at: int) -> str:
    return "n" if at else ""


def _drawn(plot: Plot) -> str:
    points = [point for line in plot.lines.values() for point in line]
    if not points:
        return f"<h2>{escape(plot.title)}</h2><p>nothing was measured</p>"
    last = max(max(x for x, _ in points), 1e-9)
    most = _round_up(max(max(y for _, y in points), 1e-9))

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / last * (_WIDTH - _LEFT - _RIGHT), _TOP + (1 - y / most) * (_HEIGHT - _TOP - _BOTTOM)

    shapes = []
    for share in (0.0, 0.5, 1.0):
        x, y = at(0, share * most)
        shapes.append(f'<line class="grid" x1="{x:.0f}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        shapes.append(f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{share * most:,.4g}</text>')
    for number in range(5):
        x, _ = at(last * number / 4, 0)
        shapes.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{last * number / 4:.0f} s</text>')
    for moment, label in plot.marks:
        x, _ = at(min(moment, last), 0)
        shapes.append(
            f'<line class="mark" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"><title>{escape(label)}</title></line>'
        )
        shapes.append(f'<text x="{x + 3:.1f}" y="{_TOP + 10}">{escape(label)}</text>')
    legend = []
    for number, (name, line) in enumerate(plot.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"><title>{escape(name)}</title></polyline>'
        )
        legend.append(f'<span><i style="background:{colour}"></i>{escape(name)}</span>')
    return (
        f'<h2>{escape(plot.title)} <small>({escape(plot.unit)})</small></h2><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(plot.title)}">{"".join(shapes)}</svg><p class="legend">{"".join(legend)}</p>'
    )


def _round_up(value: float) -> float:
    """A number with one digit that is not less."""
    size = 1.0
    while size > value:
        size /= 10
    while size * 10 <= value:
        size *= 10
    return next(size * step for step in (1, 2, 3, 4, 5, 6, 8, 10) if size * step >= value)


def per_second(points: Points, window: float = 1.0) -> list[tuple[float, float]]:
    """Counts at moments, as a rate over windows that follow each other."""
    if not points:
        return []
    rates: dict[int, float] = {}
    for moment, count in points:
        rates[int(moment / window)] = rates.get(int(moment / window), 0.0) + count
    return [((number + 0.5) * window, rates.get(number, 0.0) / window) for number in range(max(rates) + 1)]
