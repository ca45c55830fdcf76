"""Two small SVG plots, written by hand so that nothing has to be installed."""
import math
from html import escape

COLOURS = ["#1b6ca8", "#d1495b", "#2e933c", "#8d6a9f", "#e09f3e", "#5b5b5b"]
STYLE = 'font-family="sans-serif" font-size="12"'


def _document(width, height, parts):
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {STYLE}>',
                      f'<rect width="{width}" height="{height}" fill="white"/>'] + parts + ["</svg>", ""])


def _text(x, y, text, anchor="start", extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(str(text))}</text>'


def _bytes(n):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:g} {unit}"
        n /= 1024


def lines(title, series, x_label, y_label):
    """`series`: {label: [(bytes, milliseconds), ...]}, both axes logarithmic."""
    width, height, left, right, top, bottom = 720, 420, 70, 190, 40, 50
    points = [p for line in series.values() for p in line if p[0] > 0 and p[1] > 0]
    if not points:
        return _document(width, 60, [_text(20, 35, title + ": no results")])
    x_low, x_high = (f(math.log2(p[0]) for p in points) for f in (min, max))
    y_low = math.floor(min(math.log10(p[1]) for p in points))
    y_high = math.ceil(max(math.log10(p[1]) for p in points))
    x_high, y_high = max(x_high, x_low + 1), max(y_high, y_low + 1)

    def at(p):
        return (left + (math.log2(p[0]) - x_low) / (x_high - x_low) * (width - left - right),
                height - bottom - (math.log10(p[1]) - y_low) / (y_high - y_low) * (height - top - bottom))

    parts = [_text(left, 22, title, extra='font-weight="bold"')]
    for power in range(y_low, y_high + 1):
        y = at((2**x_low, 10**power))[1]
        parts += [f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
                  _text(left - 6, y + 4, f"{10.0**power:g}", "end")]
    for x in sorted({p[0] for p in points}):
        parts.append(_text(at((x, 10**y_low))[0], height - bottom + 18, _bytes(x), "middle", 'font-size="10"'))
    parts += [_text((left + width - right) / 2, height - 10, x_label, "middle"),
              _text(16, height / 2, y_label, "middle", f'transform="rotate(-90 16 {height / 2})"')]
    for i, (label, line) in enumerate(series.items()):
        colour, xy = COLOURS[i % len(COLOURS)], [at(p) for p in sorted(line) if p[0] > 0 and p[1] > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in xy)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in xy]
        y = top + 18 * i
        parts += [f'<rect x="{width - right + 12}" y="{y}" width="12" height="12" fill="{colour}"/>',
                  _text(width - right + 30, y + 11, label)]
    return _document(width, height, parts)


def bars(title, entries):
    """`entries`: [(label, median, least, most, bar or None), ...]; 1 is as fast as the other side."""
    left, width, row = 480, 900, 34
    height = 70 + row * len(entries)
    if not entries:
        return _document(width, 60, [_text(20, 35, title + ": no results")])
    high = 1.1 * max([1.0] + [v for e in entries for v in e[1:] if v is not None])

    def x(value):
        return left + value / high * (width - left - 60)

    parts = [_text(20, 22, title, extra='font-weight="bold"')]
    for i, (label, median, least, most, bar) in enumerate(entries):
        y = 40 + row * i
        colour = COLOURS[2] if bar is None or median <= bar else COLOURS[1]
        parts += [_text(left - 8, y + 15, label, "end"),
                  f'<rect x="{left}" y="{y}" width="{x(median) - left:.1f}" height="20" fill="{colour}"/>',
                  f'<line x1="{x(least):.1f}" x2="{x(most):.1f}" y1="{y + 10}" y2="{y + 10}" stroke="black"/>',
                  _text(x(max(median, most)) + 6, y + 15, f"{median:.3g}")]
        if bar is not None:
            parts.append(f'<line x1="{x(bar):.1f}" x2="{x(bar):.1f}" y1="{y - 4}" y2="{y + 24}" stroke="black" '
                         'stroke-width="2" stroke-dasharray="3 2"/>')
    one = x(1.0)
    parts += [f'<line x1="{one:.1f}" x2="{one:.1f}" y1="34" y2="{height - 26}" stroke="#888"/>',
              _text(one, height - 10, "1: equal", "middle", 'font-size="10"')]
    return _document(width, height, parts)
