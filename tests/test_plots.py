"""The pictures in docs/: drawn from results alone, readable in light and dark, and true to scale."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH, DOCS = ROOT / "bench", ROOT / "docs"
LESSON = {"round.svg", "run.svg"}
SVG = "{http://www.w3.org/2000/svg}"
LETTERS = {"bold": 9.0, "small": 6.6, "": 8.4}  # pixels of a letter, rather too many


@pytest.fixture
def drawn(bench, tmp_path):
    """change(name, found) of every result -> {file name: parsed picture}."""

    def draw(change=lambda name, found: None, more=()):
        for path in (BENCH / "results").glob("*.json"):
            found = json.loads(path.read_text())
            change(path.stem, found)
            (tmp_path / path.name).write_text(json.dumps(found))
        for name, found in dict(more).items():
            (tmp_path / f"{name}.json").write_text(json.dumps(found))
        texts = bench("plots").pictures(bench("quote").Results(tmp_path))
        return {name: ElementTree.fromstring(text) for name, text in texts.items()}

    return draw


def of_class(picture, tag, css):
    return [one for one in picture.iter(SVG + tag) if one.get("class") == css]


def words(picture):
    return "\n".join(one.text for one in picture.iter(SVG + "text"))


def widths(picture, css):
    return [float(one.get("width")) for one in of_class(picture, "rect", css)]


def test_every_picture_is_drawn_by_someone(drawn):
    """test_report.py compares their texts with what is there; test_lesson.py those of the lesson."""
    assert {path.name for path in DOCS.iterdir()} == set(drawn()) | LESSON


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_is_small_tells_the_blind_and_fits(path):
    text = path.read_text(encoding="utf-8")
    picture = ElementTree.fromstring(text)
    assert len(text) < 100_000 and picture.get("role") == "img"
    assert len(picture.find(SVG + "title").text) > 10 and len(picture.find(SVG + "desc").text) > 40
    assert "@media (prefers-color-scheme: dark)" in text and "@media print" in text
    assert not re.search(r"font(-size)?: *([0-9]|1[01])px", text), "too small for a phone"
    _, _, width, height = map(float, picture.get("viewBox").split())
    for one in picture.iter(SVG + "text"):
        kind = next((css for css in LETTERS if css in (one.get("class") or "").split()), "")
        size = float(one.get("textLength") or LETTERS[kind] * len(one.text))
        left = float(one.get("x")) - {"end": size, "middle": size / 2}.get(one.get("text-anchor"), 0)
        assert -1 <= left and left + size <= width, one.text
        assert 0 < float(one.get("y")) < height, one.text


def test_a_style_is_there_for_every_class():
    for path in DOCS.glob("*.svg"):
        picture = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        style = picture.find(SVG + "style").text
        used = {css for one in picture.iter() for css in (one.get("class") or "").split()}
        assert used and not [css for css in used if f".{css} " not in style], path.name


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_bars_and_floors_of_rounds_are_to_scale(drawn, card):
    picture = drawn()[f"round-{card}.svg"]
    shape = json.loads((BENCH / "results" / f"round-{card}.json").read_text())["qwen3-8b"]["contexts"]
    ms = [one["ms"][part] for part in ("plain_round", "round_16") for one in shape]
    floors = [one["floor_ms"][part] for part in ("plain", "round") for one in shape]
    bars = widths(picture, "grey") + widths(picture, "blue")
    assert len(bars) == 2 * len(shape) >= 2
    scale = bars[0] / ms[0]
    assert bars == pytest.approx([scale * one for one in ms], abs=0.2)
    left = float(of_class(picture, "rect", "grey")[0].get("x"))
    marks = [float(re.match(r"M([\d.]+)", one.get("d"))[1]) for one in of_class(picture, "path", "line edge")]
    assert marks == pytest.approx([left + scale * one for one in floors], abs=0.2)
    for value, floor in zip(ms, floors, strict=True):
        assert f"{value:.2f} ms, {floor / value:.0%}" in words(picture)


def test_speeds_are_those_of_each_kind(drawn):
    def change(name, found):
        for i, row in enumerate(found.get("rows", []) if name == "embedded-h200" else []):
            row.update(plain_tokens_per_s=100.0 + i, drafted_tokens_per_s=200.0 + 2 * i, speedup=2, tau=3.25)

    picture = drawn(change)["speed-h200.svg"]
    assert widths(picture, "blue") == pytest.approx([2 * width for width in widths(picture, "grey")], abs=0.3)
    assert "code: 2.00 times, tau 3.25" in words(picture) and "208 tok/s" in words(picture)


def test_kept_shares_are_counted_by_kind(bench, drawn):
    found = {"prompts": {
        "code-1": {"accepted_own": {"0": 1, "2": 3}}, "code-2": {"accepted_own": {"1": 4}},
        "chat-1": {"accepted_own": {"15": 2}},
    }}  # fmt: skip
    shares = bench("plots").kept_by_kind(found)
    assert shares["code"] == pytest.approx([7 / 8, 3 / 8] + [0] * 13) and shares["chat"] == [1.0] * 15

    def change(name, result):
        if name == "lossless-embedded-h200":
            result["prompts"] = found["prompts"]

    picture = drawn(change)["acceptance-h200.svg"]
    assert "chat: tau 16.00\ncode: tau 2.25" in words(picture)
    line = of_class(picture, "path", "line line-blue")[0].get("d")
    heights = [float(y) for y in re.findall(r" ([\d.]+)", line)]
    bottom = max(heights)
    assert [bottom - y for y in heights[:3]] == pytest.approx([240 * 7 / 8, 240 * 3 / 8, 0], abs=0.2)


def test_a_timeline_has_every_launch_where_it_ran(drawn):
    picture = drawn()["timeline-qwen3-8b-h100.svg"]
    round_ = json.loads((BENCH / "results" / "timeline-qwen3-8b-h100.json").read_text())["round_16"]
    lanes = of_class(picture, "path", "blue")
    assert len(lanes) == len(round_["kernels"])
    left, whole = (float(of_class(picture, "rect", "pale")[0].get(key)) for key in ("x", "width"))
    for lane, one in zip(lanes, round_["kernels"], strict=True):
        bars = re.findall(r"M([\d.]+) \d+h([\d.]+)v", lane.get("d"))
        places = [p for p in round_["places"] if p["kernel"] == one["kernel"] and p["adds"] is not None]
        assert len(bars) == len(places)
        for (x, width), place in zip(bars, places, strict=True):
            assert float(x) == pytest.approx(left + whole * place["at"] / round_["us"], abs=0.02)
            assert float(width) == pytest.approx(whole * place["adds"] / round_["us"], abs=0.02)
        assert f"{one['adds_us'] / 1e3:.2f} ms" in words(picture)
    assert "draft 1.28 ms, then verify" in words(picture)


WAYS = [
    {"program": "minidflash", "way": "bf16 auto", "tokens_per_s": 150.0, "spread": 1.0, "tau": 2.5,
     "same_as_reference": 2, "versions": {"numba": "1"}},
    {"program": "dflash", "way": "float32 drafted", "tokens_per_s": 30.0, "spread": 0.5, "tau": 2.25,
     "same_as_reference": 1, "versions": {"dflash": "0"}},
    {"program": "llama.cpp", "way": "q4_1 plain", "tokens_per_s": 75.0, "spread": 0.5, "tau": None,
     "same_as_reference": 0, "versions": {"llama-cpp-python": "0"}},
]  # fmt: skip
PEERS = {
    "date": "2026-01-01", "commit": "1234567", "command": "python x.py", "machine": {"cores": 2},
    "tokens": 64, "repeat": 3, "threads": 2, "clock": "wall", "prompts": ["code-1", "chat-1"], "ways": WAYS,
    "failed": {"transformers float32 plain": "did not end within 9 s"},
}  # fmt: skip


def test_peers_are_drawn_and_told_as_they_were_measured(bench, drawn, tmp_path):
    picture = drawn(more={"peers-cpu": PEERS})["peers-cpu.svg"]
    assert widths(picture, "blue")[0] == pytest.approx(5 * widths(picture, "blue")[1], abs=0.5)
    assert widths(picture, "grey")[0] == pytest.approx(widths(picture, "blue")[0] / 2, abs=0.2)
    assert "150.0, tau 2.50" in words(picture) and "\n75.0\n" in words(picture)
    results = bench("quote").Results(tmp_path)
    text = "\n".join(bench("report").measured(results))
    assert "| dflash | float32 drafted | 30.0 ± 0.5 | 2.25 | 1 of 2 | dflash `0` |" in text
    assert "transformers float32 plain: did not end within 9 s." in text
    assert "llama.cpp 75.0 (q4_1 plain)" in "\n".join(bench("report").summary(results))


def point(width, concurrency, each, rate, **changes):
    """A point of a curve as bench/curve.py writes it."""
    return {
        "width": width, "concurrency": concurrency, "texts": 16, "differing": 0, "tokens_per_s": rate,
        "plain_tokens_per_s": {1: 100.0, 4: 240.0}[concurrency],
        "user_tokens_per_s": each, "slowest_user_tokens_per_s": each / 2, "first_token_ms": 31.0,
        "slowest_first_token_ms": 62.0, "tau": 2.25, "lanes": 1.5, "rows_a_pass": 6.5,
    } | changes  # fmt: skip


CURVE = {
    "date": "2026-01-01", "commit": "1234567", "command": "python x.py",
    "machine": {"cores": 2, "processor": "a processor"}, "pair": "a pair", "on": "a machine",
    "texts": 96, "differing": 1,
    "settings": {"max_tokens": 64, "least_texts": 16, "repeat": 3, "accept": None, "slowest_percent": 5},
    "points": [point("1", 1, 100.0, 100.0), point("auto", 1, 150.0, 147.0),
               point("1", 4, 60.0, 240.0), point("auto", 4, 58.0, 230.0, tau=1.75)],
}  # fmt: skip


def test_a_curve_is_drawn_to_scale_and_says_where_auto_loses(bench, drawn, tmp_path):
    picture = drawn(more={"curve-cpu": CURVE})["curve-cpu.svg"]
    found = re.findall(r"[\d.]+", of_class(picture, "path", "line line-grey")[0].get("d"))
    (x1, y1), (x4, y4) = [(float(x), float(y)) for x, y in zip(found[::2], found[1::2], strict=True)]
    left, bottom = 60, 400  # where both axes begin
    assert (x1 - left) / (x4 - left) == pytest.approx(100 / 60, rel=1e-3)
    assert (bottom - y4) / (bottom - y1) == pytest.approx(240 / 100, rel=1e-3)
    legend = words(picture).splitlines()
    assert "a pair, 64 tokens a text; 1 of 96 texts differ from plain ones." in legend
    assert "plain" in legend and "auto" in legend and "8 rows" not in legend
    results = bench("quote").Results(tmp_path)
    text = " ".join("\n".join(bench("report").measured(results)).split())
    assert "| 4 | auto | 230 | 0.96 | 58 | 29 | 31 | 62 | 1.75 | 1.5 | 6.5 |" in text
    assert "1 of 96 texts differ from plain decoding of their prompt alone." in text
    assert "no slower than plain, within three per cent, at 1 of 2 loads; at worst 0.96 times" in text


@pytest.mark.parametrize("most, marks", [
    (240.0, [0, 50, 100, 150, 200, 250]), (5.0, [0, 1, 2, 3, 4, 5]), (7.3, [0, 2, 4, 6, 8]),
    (12000.0, [0, 5000, 10000, 15000]),
])  # fmt: skip
def test_axes_have_round_numbers(bench, most, marks):
    assert bench("plots").ticks([1.0, most]) == marks


def test_steps_of_other_programs_stand_beside_ours(drawn):
    picture = drawn()["peers-h100.svg"]
    ours, theirs = widths(picture, "blue")
    found, round_ = (
        json.loads((BENCH / "results" / f"{n}-h100.json").read_text()) for n in ("peer", "round")
    )
    ms = next(one for one in round_["qwen3-8b"]["contexts"] if one["context"] == found["context"])["ms"]
    assert theirs / ours == pytest.approx(found["dflash_step_ms"]["median"] / ms["round_16"], rel=0.01)
    ours, theirs = widths(picture, "grey")
    assert theirs / ours == pytest.approx(
        found["transformers_token_ms"]["median"] / ms["plain_round"], rel=0.01
    )


def test_a_refused_result_is_not_drawn(drawn):
    def change(name, found):
        if name == "round-h200":
            found["commit"] += "+changes"

    assert set(drawn()) - set(drawn(change)) == {"round-h200.svg"}
