"""Pictures of what was measured, as SVG that needs nothing to be drawn with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee")
_BAR, _LEFT, _WIDTH = 18, 260, 420


def draw(part: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Pictures of a part's results, by file name."""
    if part == "kernels":
        shares = {
            f"{name}: {what.removeprefix('share_of_')}": one[what]
            for name, one in found.items()
            if isinstance(one, Mapping)
            for what in one
            if what.startswith("share_of_")
        }
        return {"kernels.svg": bars("share of the ceiling", {"": shares})}
    if part == "steps":
        names = [
            f"{step['decodes']} x {step['keys']} + {'+'.join(str(n) for _, n in step['prefills'])}"
            for step in found["steps"]
        ]
        over = {
            strategy: {
                name: step["seconds"][strategy] / step["roofline_of_kernels"]
                for name, step in zip(names, found["steps"], strict=True)
            }
            for strategy in found["steps"][0]["seconds"]
        }
        points = [(step["seconds"]["sequential"], step["predicted"]) for step in found["steps"]]
        pictures = {
            "steps.svg": bars("seconds over the roofline of kernels in turn (decodes x keys + prefills)", over),
            "predicted.svg": diagonal("seconds of steps, measured and predicted", points),
        }
        for strategy, profile in found["profiles"].items():
            if profile:
                pictures[f"{strategy}.svg"] = timeline(f"kernels of a blended step, {strategy}", profile["spans"])
        return pictures
    if part.startswith("table2"):
        orders = {name: one["share_of_optimum"] for name, one in found["orders"].items()}
        by_law = {law: {order: shares[law] for order, shares in orders.items()} for law in ("in_turn", "overlapped")}
        return {f"{part}.svg": bars(f"share of the optimum, {found['best_strategy']}", by_law)}
    if part == "strategies":
        gains = {
            mix: {name: jobs["sequential"]["seconds"] / one["seconds"] for name, one in jobs.items()}
            for mix, jobs in found.items()
        }
        return {"strategies.svg": bars("speed over sequential", gains)}
    if part == "full":
        shares_of = {
            setting: {order: one["fraction_of_optimal"] for order, one in orders.items()}
            for setting, orders in found.items()
        }
        return {"full.svg": bars("share of the optimum, 100,000 rows simulated", shares_of)}
    return {}


def bars(title: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Horizontal bars: a colour a group, a row for each name and group."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    most = max(value for group in groups.values() for value in group.values())
    body, y = [], 40
    for name in names:
        for colour, group in zip(COLOURS, groups.values()):
            if name in group:
                body.append(_text(_LEFT - 8, y + 12, name, anchor="end"))
                body.append(_box(_LEFT, y, group[name] / most * _WIDTH, _BAR - 4, colour))
                body.append(_text(_LEFT + group[name] / most * _WIDTH + 4, y + 12, f"{group[name]:.3g}"))
                y += _BAR
        y += 4
    for i, (colour, group_name) in enumerate(zip(COLOURS, groups)):
        if group_name:
            body += [_box(_LEFT + 150 * i, y + 4, 12, 12, colour), _text(_LEFT + 150 * i + 16, y + 14, group_name)]
    return _svg(title, _LEFT + _WIDTH + 80, y + 30, body)


def diagonal(title: str, points: Sequence[tuple[float, float]]) -> str:
    """Points on logarithmic axes, and the lines between which both are within 10 %."""
    logs = [math.log(value) for point in points for value in point]
    low, high = min(logs) - 0.1, max(logs) + 0.1
    size = 420

    def at(value: float) -> float:
        return (math.log(value) - low) / (high - low) * size

    body = []
    for factor in (0.9, 1.0, 1.1):
        ends = [math.exp(low) * 1.12, math.exp(high) / 1.12]
        (x0, x1), (y0, y1) = ([at(end) for end in ends], [at(end * factor) for end in ends])
        body.append(
            f'<line x1="{40 + x0:.1f}" y1="{40 + size - y0:.1f}" x2="{40 + x1:.1f}" y2="{40 + size - y1:.1f}" '
            'stroke="#999999"/>'
        )
    body += [
        f'<circle cx="{40 + at(x):.1f}" cy="{40 + size - at(y):.1f}" r="3" fill="{COLOURS[0]}"/>' for x, y in points
    ]
    body.append(_text(40, 60 + size, f"{math.exp(low):.2g} to {math.exp(high):.2g} s, measured to the right"))
    return _svg(title, size + 80, size + 80, body)


def timeline(title: str, spans: Sequence[tuple[float, float, str]]) -> str:
    """Kernels as boxes over time, each in the first row that is free."""
    end = max(span[1] for span in spans)
    free: list[float] = []
    body = []
    for begun, ended, name in spans:
        row = next((i for i, until in enumerate(free) if until <= begun), len(free))
        free[row : row + 1] = [ended]
        colour = COLOURS[0] if "attend" in name or "merge" in name else COLOURS[3]
        width = max(0.5, (ended - begun) / end * 960)
        body.append(_box(20 + begun / end * 960, 40 + 24 * row, width, 20, colour))
    body.append(_text(20, 60 + 24 * len(free), f"0 to {end:.0f} us; attention blue, others yellow"))
    return _svg(title, 1000, 80 + 24 * len(free), body)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="11" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, width: int, height: int, body: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="20" y="22" font-size="14">{escape(title)}</text>',
            *body,
            "</svg>\n",
        ]
    )
