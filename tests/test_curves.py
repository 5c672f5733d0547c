"""The curves on the screen, read back from their SVG."""

from __future__ import annotations

import base64
import math
import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from histories import falling, made
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_nb.curves import MAX_BYTES, axis_end, curves_svg, static_bundle
from accel_nb.history import History

SVG = "{http://www.w3.org/2000/svg}"


def parsed(history, *args, **options):
    text = curves_svg(history, *args, **options)
    assert len(text.encode()) <= MAX_BYTES
    return ET.fromstring(text)


def lines(root, kind):
    """The `d` of the paths of one class."""
    return [path.get("d") for path in root.iter(f"{SVG}path") if path.get("class") == kind]


def texts(root):
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def zones(root):
    """What shows on hover: per zone its place, its lines of text, and whether its box stands to the left."""
    group = next((g for g in root.iter(f"{SVG}g") if g.get("class") == "h"), None)
    if group is None:
        return []
    return [
        (
            float(re.search(r"translate\(([\d.]+)\)", zone.get("transform"))[1]),
            ["".join(text.itertext()) for text in zone.iter(f"{SVG}text")],
            zone.get("class") == "f",
        )
        for zone in group.findall(f"{SVG}g")
    ]


def test_two_charts_with_their_lines():
    root = parsed(falling(1000), [("first", falling(1200, seed=1))])
    assert {"loss", "accuracy", "step"} <= set(texts(root))
    for kind, number in (("t", 2), ("v", 2), ("d", 2), ("p", 2), ("r", 0), ("x", 0)):
        assert len(lines(root, kind)) == number, kind
    assert len(list(root.iter(f"{SVG}circle"))) == 2


def test_a_regression_has_one_wide_chart():
    root = parsed(falling(300, accuracy=False))
    assert "accuracy" not in texts(root)
    assert len(lines(root, "t")) == len(lines(root, "v")) == 1
    assert int(root.find(f".//{SVG}circle").get("cx")) == 4 * (1080 - 50 - 8)  # in quarters of a pixel


def test_the_outer_size_never_changes():
    shapes = [History(), falling(1), falling(5000), falling(80, accuracy=False), made([math.nan] * 9)]
    boxes = {tuple(map(parsed(shape).get, ("viewBox", "width", "height", "style"))) for shape in shapes}
    assert boxes == {("0 0 1080 256", "1080", "256", "max-width:100%;height:auto")}
    assert parsed(falling(100), width=700).get("viewBox") == "0 0 700 256"


def test_before_the_first_step():
    root = parsed(History())
    assert texts(root).count("waiting for the first step") == 2
    assert not lines(root, "t")
    assert not zones(root)
    early = parsed(History([{"event": "started", "steps_per_epoch": 12}]), [("before", falling(50))])
    assert len(lines(early, "p")) == 2


def test_a_single_step_is_a_dot():
    for log in (False, True):
        root = parsed(made([0.7], [0.0], per_epoch=5), log=log)
        assert [d.endswith("h0") for d in lines(root, "t")] == [True, True]
        assert len(list(root.iter(f"{SVG}circle"))) == 2  # an accuracy of 0.0 is a value


def test_one_epoch_of_validation_is_a_dot():
    root = parsed(made([2.0, 1.0, 0.5], [0.1, 0.2, 0.3]))
    assert [d.count("M") for d in lines(root, "d")] == [1, 1]


def test_no_validation_says_nothing_of_it():
    root = parsed(falling(50, validation=False))
    assert not lines(root, "v")
    assert not any("validation" in text for text in texts(root))


def test_a_loss_of_zero_is_drawn():
    root = parsed(made([0.0]))
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    assert "train 0" in texts(root)


def test_zero_on_a_log_axis_is_said():
    loss = np.linspace(2, 0.5, 60)
    loss[[7, 8]] = 0.0
    root = parsed(made(loss, validation=False), log=True)
    assert any("2 values of 0 or less left out on the log axis" in text for text in texts(root))
    assert any(text.startswith("log") for text in texts(root))
    assert "2 values of 0 or less" in root.find(f"{SVG}desc").text


def test_a_log_axis_without_any_positive_value_becomes_a_linear_one():
    root = parsed(made([0.0, 0.0], validation=False), log=True)
    assert any("no loss above 0: linear axis instead of a log one" in text for text in texts(root))
    assert "log" not in texts(root)
    assert len(lines(root, "t")) == 1


def test_early_losses_a_billion_times_larger_stay_on_the_axis():
    for log in (False, True):
        root = parsed(made([1e9, 0.5], validation=False), log=log)
        (d,) = lines(root, "t")
        y = int(re.match(r"M\d+ (\d+)l", d)[1])
        assert y <= 4 * 190 / 5  # near the top


def test_nan_is_a_marked_gap_and_said():
    loss = np.linspace(2, 1, 50)
    loss[11:14] = math.nan
    loss[30] = math.inf
    root = parsed(made(loss, validation=False))
    assert len(re.findall("M", lines(root, "x")[0])) == 2
    assert len(re.findall("M", lines(root, "t")[0])) == 3
    said = "loss NaN or infinite at 4 steps, first at step 12"
    assert any(said in text for text in texts(root))
    assert said in root.find(f"{SVG}desc").text


def test_a_run_of_nothing_but_nan():
    root = parsed(made([math.nan] * 30))
    assert not lines(root, "t")
    assert lines(root, "x")
    assert not list(root.iter(f"{SVG}circle"))


def test_validation_that_is_nan_is_said():
    history = falling(20, per_epoch=10, validation=False)
    history.add({"event": "epoch", "epoch": 2, "step": 20, "val_loss": math.nan, "val_accuracy": 0.5})
    said = "validation loss NaN or infinite in 1 epoch, first at step 20"
    assert any(said in text for text in texts(parsed(history)))


def test_smoothing_keeps_the_measured_line_behind():
    root = parsed(falling(800), smooth=0.6)
    assert len(lines(root, "r")) == len(lines(root, "t")) == 2
    assert "smooth 0.6" in texts(root)
    for raw, average in zip(lines(root, "r"), lines(root, "t"), strict=True):
        assert raw.count(" ") + raw.count("-") > average.count(" ") + average.count("-")


@pytest.mark.parametrize("smooth", [-0.1, 1.0, 1.5, math.nan])
def test_a_weight_that_is_none_is_refused(smooth):
    with pytest.raises(ValueError, match="not a weight"):
        curves_svg(falling(5), smooth=smooth)


def test_too_narrow_is_refused():
    with pytest.raises(ValueError, match="Give 400 or more"):
        curves_svg(falling(5), width=200)


def test_the_axis_of_a_long_run_grows_by_doubling_and_ends_at_its_total():
    ends = [axis_end(length, 100_000) for length in range(1, 100_001, 97)]
    assert ends == sorted(ends)
    assert all(length <= end for length, end in zip(range(1, 100_001, 97), ends, strict=True))
    assert len(set(ends)) < 10
    assert axis_end(100_000, 100_000) == 100_000
    assert axis_end(3, 60) == 60
    assert axis_end(3, None) == 0


def test_a_known_total_keeps_the_axis_still():
    (first,), (second,) = (
        [float(c.get("cx")) for c in list(parsed(falling(n), total=1000).iter(f"{SVG}circle"))[:1]]
        for n in (250, 500)
    )
    assert second == pytest.approx(2 * first, abs=1)


# ---- earlier runs


def test_earlier_runs_are_named_and_bounded():
    earlier = [(f"run {i}", falling(300, seed=i)) for i in range(9)]
    root = parsed(falling(300), earlier)
    assert len(lines(root, "p")) == 2 * 6
    assert any("earlier: run 6, run 7, run 8 and 6 more" in text for text in texts(root))


def test_names_may_hold_markup_and_control_characters():
    name = '<script>"&\x00\ud800\n]]>' + "long " * 50
    text = curves_svg(falling(30), [(name, falling(30, seed=1))])
    assert "<script" not in text
    root = ET.fromstring(text)
    legend = next(t for t in texts(root) if "earlier" in t)
    assert '<script>"&' in legend
    assert len(legend) < 80


def test_an_earlier_run_that_blew_up_does_not_flatten_this_one():
    root = parsed(made([2.0, 1.0, 0.5, 0.4], per_epoch=9), [("bad", made([1e30, math.nan, 1e35]))])
    y = [int(re.match(r"M\d+ (\d+)", d)[1]) for d in lines(root, "t")]
    assert y[0] < 4 * 190 * 0.8
    assert "0.0e30" not in texts(root)


def test_log_axes_with_odd_earlier_runs():
    for own, other in (
        ([-1.0, -2.0], [5.0, 1.0]),
        ([5e-324, 1.0], [1e-9]),
        ([math.nan], [2.0, 1.0]),
        ([1.0], [-1.0]),
    ):
        root = parsed(made(own, validation=False), [("e", made(other, validation=False))], log=True)
        linear = any("linear axis" in text for text in texts(root))
        assert linear == (own == [-1.0, -2.0])


def test_an_earlier_run_that_has_grown_is_drawn_anew():
    earlier = falling(100, seed=3)
    before = lines(parsed(falling(500), [("e", earlier)]), "p")
    earlier.add({"event": "batch", "epoch": 11, "first": 101, "loss": [0.9] * 50, "accuracy": [0.2] * 50})
    assert lines(parsed(falling(500), [("e", earlier)]), "p") != before


def test_earlier_runs_are_let_go():
    import gc
    import weakref

    earlier = falling(100)
    curves_svg(falling(50), [("e", earlier)])
    watch = weakref.ref(earlier)
    del earlier
    gc.collect()
    assert watch() is None


# ---- values on hover


def check_hover(history, root, *, smooth=False):
    """Every number that shows on hover against the history; returns the steps shown."""
    columns, validated = history.columns(), np.flatnonzero(np.isfinite(history.val_loss)) + 1
    shown = []
    for _, words, _ in zones(root):
        charts = [words] if len(words) <= 3 else [words[: len(words) // 2], words[len(words) // 2 :]]
        for chart, column in zip(charts, ("loss", "accuracy"), strict=False):
            step = int(re.match(r"step ([\d,]+) · epoch ([\d.]+)$", chart[0])[1].replace(",", ""))
            assert float(chart[0].split("epoch ")[1]) == pytest.approx(history.epochs_done(step), abs=0.051)
            value = re.match(r"train (\S+)", chart[1])[1]
            assert value == f"{columns[column][step - 1]:.4g}".replace("nan", "NaN")
            assert ("average" in chart[1]) == smooth
            if len(chart) == 3:
                past = validated[validated <= step]
                if not len(past):
                    assert chart[2] == "validation –"
                    continue
                value = columns[f"val_{column}"][past[-1] - 1]
                when = "" if past[-1] == step else f" · epoch {history.epoch[past[-1] - 1]}"
                assert chart[2] == f"validation {value:.4g}{when}"
        shown.append(step)
    return shown


@pytest.mark.parametrize("steps", [1, 12, 120, 1000, 30_000])
@pytest.mark.parametrize("options", [{}, {"smooth": 0.6}, {"log": True}])
def test_hover_values_are_those_of_the_history(steps, options):
    history = falling(steps)
    shown = check_hover(history, parsed(history, **options), smooth="smooth" in options)
    assert shown[-1] == steps
    assert shown == sorted(set(shown))
    assert len(shown) >= min(steps, 12)


def test_hover_without_validation_and_for_a_regression():
    for history in (falling(400, validation=False), falling(400, accuracy=False)):
        assert len(check_hover(history, parsed(history))) > 20


def test_hover_shows_nan():
    history = made([1.0, math.nan, 2.0], validation=False)
    check_hover(history, parsed(history))
    assert "train NaN" in texts(parsed(history))


def test_hover_meets_the_steps_of_validation():
    history = falling(1000, per_epoch=100)
    shown = check_hover(history, parsed(history))
    assert {100, 200, 300, 400, 500, 600, 700, 800, 900, 1000} <= set(shown)


def test_the_box_changes_sides_before_it_leaves_the_chart():
    places = zones(parsed(falling(1000)))
    chart = (1080 - 50 - 66 - 8) / 2
    for at, _, flipped in places:
        assert flipped == (at > chart - 192 - 12)
        assert at - 200 >= 0 if flipped else at + 8 + 192 <= chart
    assert {flipped for _, _, flipped in places} == {True, False}


# ---- a page


def test_text_for_those_who_do_not_see_it():
    root = parsed(falling(1000), [("first", falling(20))])
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == "Training curves: loss and accuracy"
    description = root.find(f"{SVG}desc").text
    assert falling(1000).summary() in description
    assert "lowest validation loss" in description
    assert "earlier runs: first" in description


def test_styles_do_not_leave_the_picture_and_there_are_no_ids():
    shapes = [falling(50), falling(50, accuracy=False), falling(50, validation=False), falling(80)]
    sheets = {}
    for shape in shapes:
        text = curves_svg(shape)
        assert " id=" not in text
        root = ET.fromstring(text)
        name, sheet = root.get("class"), root.find(f"{SVG}style").text
        for selector in re.findall(r"([^{}]+)\{", sheet):
            for single in selector.split(","):
                assert single.split()[0] == f".{name}", single
        assert sheets.setdefault(name, sheet) == sheet  # the same class only with the same rules
    assert len(sheets) == 3


def test_classes_do_not_differ_in_case_alone():
    root = parsed(falling(50), [("e", falling(30))], smooth=0.5)
    classes = {element.get("class") for element in root.iter() if element.get("class")}
    assert len({name.lower() for name in classes}) == len(classes)


def test_hidden_without_style_sheets_and_no_script():
    text = curves_svg(falling(100))
    assert 'visibility="hidden"' in text
    assert not re.search(r"<script|javascript:|\son\w+=|href", text)


# ---- size

SHAPES = {
    "thousand": lambda: falling(1000, per_epoch=37),
    "hundred thousand": lambda: falling(100_000, per_epoch=100),
    "million": lambda: falling(1_000_000, per_epoch=20_000),
    "every second step NaN": lambda: made([1.0, math.nan] * 300, [0.5, math.nan] * 300, per_epoch=3),
    "wild": lambda: made(np.random.default_rng(0).standard_normal(3000) * 1e300, [0.0, 1.0] * 1500, per_epoch=4),
    "regression": lambda: falling(5000, accuracy=False, per_epoch=20),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_never_more_than_15_kb(shape):
    history = SHAPES[shape]()
    others = [("x" * 40, falling(9000, seed=1)), ("&" * 40, made([1.0, math.nan] * 90)), ("é" * 40, history)]
    for options in ({}, {"smooth": 0.6}, {"log": True, "smooth": 0.99}, {"total": 10**9}, {"width": 3000}):
        for earlier in ([], others, others * 3):
            assert len(curves_svg(history, earlier, **options).encode()) <= MAX_BYTES <= 15_000


values = st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.7e308, -1.7e308, 5e-324]))
runs = st.builds(
    made,
    st.lists(values, max_size=300),
    per_epoch=st.integers(1, 60),
    validation=st.booleans(),
    block=st.integers(1, 40),
)
classified = st.lists(st.tuples(values, values), max_size=300).map(
    lambda pairs: made([a for a, _ in pairs], [b for _, b in pairs], per_epoch=9)
)


@settings(max_examples=80)
@given(
    st.one_of(runs, classified),
    st.lists(st.tuples(st.text(max_size=30), runs), max_size=2),
    st.booleans(),
    st.one_of(st.just(0.0), st.floats(0, 0.99)),
)
def test_any_history_gives_a_sound_picture(history, earlier, log, smooth):
    root = parsed(history, earlier, log=log, smooth=smooth)
    for path in root.iter(f"{SVG}path"):
        assert re.fullmatch(r"[MmlhvzMHV\d\s.-]+", path.get("d"))
    for element in root.iter():
        for name, value in element.items():
            assert "nan" not in value.lower(), name
            assert "inf" not in value.lower(), name
    assert len(root.find(f"{SVG}desc").text) < 1200


# ---- what stays


def test_what_stays_in_a_saved_notebook():
    history = falling(1000)
    bundle = static_bundle(history, [("first", falling(500))], smooth=0.6)
    assert set(bundle) == {"image/svg+xml", "image/png", "text/plain"}
    live = curves_svg(history, [("first", falling(500))], smooth=0.6)
    assert bundle["image/svg+xml"] == live.replace(' width="1080" height="256"', "", 1) != live
    assert bundle["text/plain"] == history.summary()
    png = base64.b64decode(bundle["image/png"], validate=True)
    assert png.startswith(b"\x89PNG")
    assert tuple(np.frombuffer(png[16:24], dtype=">u4")) == (800, 300)
    assert len(png) < 60_000


@pytest.mark.parametrize("log", [False, True])
def test_what_stays_of_odd_histories(log):
    odd = [History(), made([0.0]), made([math.nan] * 5), made([1e308, -1e308, math.inf]), falling(200_000)]
    for history in odd:
        bundle = static_bundle(history, log=log)
        assert sum(map(len, bundle.values())) < 100_000
        assert "\n" not in bundle["text/plain"]


def test_drawing_on_the_screen_loads_no_matplotlib():
    code = (
        "import sys; from accel_nb.history import History; from accel_nb.curves import curves_svg;"
        "h = History([{'event': 'batch', 'epoch': 1, 'first': 1, 'loss': [1.0]}]); curves_svg(h);"
        "print(sorted({'matplotlib', 'pandas', 'ipywidgets', 'IPython', 'PIL'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    )


@pytest.mark.parametrize("total", [54, 1_290, 1_300, 5_400, 12_900, 130_000])
def test_no_number_stands_on_the_name_of_the_axis(total):
    svg = curves_svg(falling(10), [("as long as this", falling(total))])
    names = [float(x) for x in re.findall(r'<text class="e" x="([\d.]+)"[^>]*>step<', svg)]
    numbers = re.findall(r'<text class="m" x="([\d.]+)"[^>]*>([^<]+)<', svg)
    assert len(names) == 2
    assert len(numbers) > 4
    for x, label in numbers:
        end = float(x) + 3 * len(label)  # digits of 11 px type are 6 px wide
        assert not any(end > name - 28 and float(x) <= name for name in names), (total, label)
