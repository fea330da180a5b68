"""Charts put values where they belong, and every output format says the same."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from draco_ray.lab.report.charts import (
    SOLVED,
    Series,
    format_compact,
    heat_color,
    heat_map,
    line_chart,
    percent,
    stacked_bars,
    timeline,
)
from draco_ray.lab.report.drawing import (
    OTHER_COLOR,
    Drawing,
    palette,
    shortened,
    text_width,
    to_image,
    to_svg,
)

STEP = 0.1
"""The precision of coordinates in the SVG."""
NUMBER = re.compile(r"-?[0-9.]+")


def shapes(drawing: Drawing, tag: str) -> list[SimpleNamespace]:
    """The elements of one kind as the SVG has them: attributes, text and tooltip."""
    found = []
    for each in ElementTree.fromstring(to_svg(drawing)).iter(tag):
        given = {
            name.replace("-", "_"): float(value) if NUMBER.fullmatch(value) else value for name, value in each.items()
        }
        found.append(SimpleNamespace(**given, string=each.text, hint=each.findtext("title", "")))
    return found


def dots(drawing: Drawing) -> list[SimpleNamespace]:
    return shapes(drawing, "circle")


def bars(drawing: Drawing) -> list[SimpleNamespace]:
    return [box for box in shapes(drawing, "rect") if box.hint]


def words(drawing: Drawing) -> list[str]:
    return [text.string for text in shapes(drawing, "text")]


def test_a_line_goes_up_when_values_do_and_breaks_where_there_is_none() -> None:
    drawing = line_chart("t", [Series("a", [1, 2, 3, 4, 5], [0.0, 0.5, None, 0.5, 1.0])], bounds=(0, 1), number=percent)
    heights = [dot.cy for dot in dots(drawing)]
    assert heights[0] > heights[1] == heights[2] > heights[3]
    assert heights[0] - heights[1] == pytest.approx(heights[2] - heights[3], abs=2 * STEP)
    colored = [line for line in shapes(drawing, "polyline") if line.stroke.startswith("#")]
    assert [len(line.points.split()) for line in colored] == [2, 2]
    assert dots(drawing)[1].hint == "a, step 2: 50%"


def test_bars_stack_in_proportion() -> None:
    drawing = stacked_bars("t", ["1", "2"], {"a": [1.0, 2.0], "b": [3.0, 0.0]})
    one_a, one_b, two_a = bars(drawing)
    assert one_b.height == pytest.approx(3 * one_a.height, abs=STEP)
    assert two_a.height == pytest.approx(2 * one_a.height, abs=STEP)
    assert one_b.y + one_b.height == pytest.approx(one_a.y, abs=2 * STEP)


def test_every_run_has_its_name_below_its_bar() -> None:
    names = [f"draco-20261121-{number}" for number in range(6)]
    drawing = stacked_bars("t", names, {"a": [1.0] * 6}, axis="run", all_labels=True)
    found = [text for text in shapes(drawing, "text") if text.string in names]
    assert [text.string for text in found] == names
    for one, other in itertools.combinations(found, 2):
        apart = abs(one.x - other.x) >= text_width(one.string, one.font_size)
        assert apart or abs(one.y - other.y) >= one.font_size, (one, other)
    assert all(text.y < drawing.height for text in shapes(drawing, "text"))


def test_many_steps_stay_inside_the_chart() -> None:
    steps = list(range(1, 1001))
    for drawing in (
        line_chart("t", [Series("a", steps, [float(step) for step in steps])]),
        stacked_bars("t", [str(step) for step in steps], {"a": [1.0] * 1000}),
        heat_map("t", ["a"], [str(step) for step in steps], [[0.5] * 1000]),
    ):
        assert len(words(drawing)) < 60
        for box in bars(drawing):
            assert box.x >= 0
            assert box.x + box.width <= drawing.width


@pytest.mark.parametrize("values", [[0.0, 0.0], [-3.0, -1.0], [5.0, 5.0], [1e-9, 2e-9], [1e12, -1e12]])
def test_an_axis_holds_its_values(values: list[float]) -> None:
    drawing = line_chart("t", [Series("a", [1, 2], values)])
    assert all(20 <= dot.cy <= drawing.height - 25 for dot in dots(drawing))


def test_no_data_is_said() -> None:
    for drawing in (
        line_chart("t", [Series("a", [], [])]),
        line_chart("t", []),
        stacked_bars("t", ["1"], {"a": [0.0]}),
        stacked_bars("t", [], {}),
        heat_map("t", [], [], []),
        timeline("t", {}, colors={}, width=640),
    ):
        assert "nothing recorded" in words(drawing)


def test_overlapping_work_gets_tracks_of_its_own() -> None:
    drawing = timeline("t", {"rollout": [(0, 4), (1, 3), (4, 5)]}, colors={}, width=640)
    first, second, third = shapes(drawing, "rect")
    assert first.y != second.y
    assert first.y == third.y
    assert first.width == pytest.approx(2 * second.width, abs=STEP)


def test_a_kind_has_one_colour_wherever_it_stands() -> None:
    colors = {"learning": "#123456", "rollout": "#654321"}
    for lanes in (
        {"rollout": [(0.0, 1.0)], "learning": [(1.0, 2.0)]},
        {"learning": [(1.0, 2.0)], "other": [(0.0, 1.0)]},
    ):
        drawing = timeline("t", lanes, colors=colors, width=640)
        found = [box.fill for box in shapes(drawing, "rect")]
        assert found == [colors.get(name, OTHER_COLOR) for name in lanes]
    stacked = stacked_bars("t", ["1"], {"learning": [1.0], "rollout": [2.0]}, colors=colors)
    assert [bar.fill for bar in bars(stacked)] == ["#123456", "#654321"]


@pytest.mark.parametrize("name", ["\u5b57" * 40, "Donaudampfschifffahrt\u00e4" * 5, "W" * 60])
def test_a_long_name_stays_inside_a_heat_map_in_a_wider_font_too(name: str) -> None:
    drawing = heat_map("t", [name], ["1"], [[0.5]])
    (label,) = [text for text in shapes(drawing, "text") if text.text_anchor == "end"]
    assert label.string.endswith("…")
    assert label.x - 1.15 * text_width(label.string, label.font_size) >= 0
    # Such a character is about a square.
    assert text_width("\u5b57\u3042", 8) == pytest.approx(16, abs=2)


def test_what_is_solved_is_marked_and_what_was_never_asked_stays_blank() -> None:
    drawing = heat_map("t", ["a", "b"], ["1", "2"], [[0.5, None], [None, None]], marks={(0, 1): "solved"})
    assert [bar.hint for bar in bars(drawing)] == ["a, training step 1: 50%", "a, training step 2: solved"]
    assert words(drawing).count("✓") == 1
    assert [bar.fill for bar in bars(drawing)][1] == SOLVED


def test_colours_and_numbers() -> None:
    assert heat_color(-1) == heat_color(0.0)
    assert heat_color(0.5) == "#ecc46e"
    assert [format_compact(value) for value in (1234567.0, 123456.0, 123.4, 0.5)] == ["1.2M", "123k", "123", "0.5"]


def test_text_is_cut_to_fit() -> None:
    assert shortened("short", 8, 100) == "short"
    words = "a word or two more"
    assert shortened(words, 8, text_width(words, 8) + 1e-9) == words
    for width in range(10, 60, 7):
        fitting = max(n for n in range(len(words)) if text_width(words[:n] + "…", 8) <= width)
        assert shortened(words, 8, width) == words[:fitting].rstrip() + "…"
    # By work that grows with what is shown: a title may be as long as its author likes.
    assert len(shortened("w" * 10_000_000, 8, 60)) < 20
    cut = shortened("a rather long criterion title", 8, 60)
    assert cut.endswith("…")
    assert text_width(cut, 8) <= 60


def test_svg_escapes_what_it_writes() -> None:
    drawing = heat_map("<t>", ["</svg><script>"], ["1"], [[0.5]])
    svg = to_svg(drawing)
    assert "<script" not in svg
    assert "&lt;/svg&gt;&lt;script&gt;" in svg


def test_a_figure_is_an_image_of_its_own_that_says_what_the_drawing_says() -> None:
    drawing = stacked_bars("Cost (50 %) $x$ ü ☃", ["1"], {"a": [1.0], "b": [2.0]})
    image = ElementTree.fromstring(to_image(drawing))
    assert (image.get("width"), image.get("height")) == (f"{drawing.width:g}", f"{drawing.height:g}")
    assert {palette(0), palette(1), "#ffffff"} <= {each.get("fill") for each in image.iter()}
    assert drawing.title in {each.text for each in image.iter()}
