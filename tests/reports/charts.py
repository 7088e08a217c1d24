"""Reads numbers off a chart from the positions of its elements and the labels of its axes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg):
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def elements(svg, tag, name=""):
    return [element for element in parsed(svg).iter(SVG + tag) if name in ("", *element.get("class", "").split())]


def points(path):
    return [tuple(map(float, point.split())) for point in re.findall(r"[ML]([\d.-]+ [\d.-]+)", path)]


def scale(svg):
    """Functions that map positions on the canvas to numbers, based on the axis labels."""
    texts = [
        (float(t.get("x")), float(t.get("y")), t.text) for t in elements(svg, "text") if t.get("transform") is None
    ]
    ys = [float(re.match(r"M[\d.]+ ([\d.]+)", path.get("d"))[1]) for path in elements(svg, "path", "grid")]
    labels = [next(float(text.replace(",", "")) for _, at, text in texts if abs(at - 4 - y) < 0.06) for y in ys]
    xs = [
        float(re.match(r"M([\d.]+) [\d.]+v4", path.get("d"))[1])
        for path in elements(svg, "path", "axis")
        if "v4" in path.get("d")
    ]
    below = max(at for _, at, _ in texts if any(abs(at - y) for y in ys))
    ticks = [
        next(
            float(text.replace(",", ""))
            for at, y, text in texts
            if abs(at - x) < 0.06 and y > below - 20 and re.match(r"^[\d,.e+-]+$", text)
        )
        for x in xs
    ]
    return np.poly1d(np.polyfit(xs, ticks, 1)), np.poly1d(np.polyfit(ys, labels, 1))
