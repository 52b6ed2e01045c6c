"""The page of a trace in a real browser: nothing fetched, nothing obeyed, read by eye, keyboard and ear.

Needs Chromium: `apt-get install chromium`; .ci/run does.
"""

import re
import shutil
from itertools import pairwise

import pytest

from minidflash.errors import UserError
from minidflash.trace import page as pages
from minidflash.trace.read import NEEDED, read
from tests.traces import HEADER, LINES, NASTY, line_of, save

BROWSER = shutil.which("chromium")
WIDTHS = 320, 768, 1440


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The page of a trace whose texts are what an attacker would write."""
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_text(pages.render(read(save(path.with_suffix(".jsonl"))), NASTY[1]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium():
    if BROWSER is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(chromium, html):
    """open(width, scheme) -> the page, shown. `said`: what its console and the network were asked."""
    context = chromium.new_context()
    said, page = [], context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))

    def show(width=1440, scheme="light", path=html):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(path.as_uri())
        return page

    show.said, show.file = said, html.as_uri()
    yield show
    context.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_in_light_and_dark_and_fetches_nothing(opened, width, tmp_path):
    grounds = set()
    for scheme in ("light", "dark"):
        page = opened(width, scheme)
        inside = "document.documentElement.scrollWidth <= innerWidth"
        assert page.evaluate(inside), "nothing but charts of their own scrolls sideways"
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
    assert len(grounds) == 2
    assert opened.said == [opened.file] * 2, "no word on the console, nothing asked of the network"


def test_text_injects_nothing(opened):
    page = opened()
    assert page.evaluate("window.hit") is None
    assert page.locator("img, iframe, object, link, [onerror], [onfocus]").count() == 0
    assert page.locator("script").count() == 2 and page.locator("style").count() == 1
    texts = [page.locator("[data-token]").nth(i).text_content() for i in range(9)]
    told = [text.encode("unicode_escape").decode() if "\x1b" in text else text for text in NASTY[:9]]
    told[3], told[8] = "\\u202etxt.exe", "]]>\\u2028\\u2029-->"
    assert [text.removeprefix("↵") for text in texts] == told
    assert "7 * 7" in page.locator("#text").text_content() and page.title().startswith(NASTY[1])
    page.locator("[data-token]").nth(0).hover()
    assert NASTY[0].replace('"', '\\"') in page.locator("#detail").text_content()
    assert page.locator("#detail img").count() == 0


def test_its_policy_stops_what_would_get_in(opened):
    page = opened()
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hit = 1';"
        " document.body.append(s); const i = document.createElement('img');"
        " i.src = 'https://nothing.invalid/x';"
        " document.body.append(i); document.body.insertAdjacentHTML('beforeend',"
        " '<b onclick=\"window.hit=1\">x</b>'); document.body.lastChild.click(); }"
    )
    assert page.evaluate("window.hit") is None
    refused = " ".join(words for words in opened.said if "Content Security Policy" in words)
    for what in ("Executing inline script", "Executing inline event handler", "Loading the image"):
        assert what in refused


def test_a_token_tells_of_itself_when_pointed_at(opened):
    page = opened()
    tokens, detail = page.locator("[data-token]"), page.locator("#detail")
    tokens.nth(1).hover()
    assert "drafted, and kept" in detail.text_content() and "7 of 7 drafts kept" in detail.text_content()
    tokens.nth(9).hover()  # of the round that kept none
    told = detail.text_content()
    assert "the target's own" in told and '" d0"' in told and "0.500 above the second choice" in told
    assert page.locator(".same").count() == 1
    assert page.locator("#text s").first.is_hidden()
    page.get_by_label("show rejected drafts").check()
    assert page.locator("#text s").first.is_visible()


def test_the_keyboard_goes_everywhere(opened):
    page = opened()
    page.keyboard.press("Tab")  # the switch
    page.keyboard.press("Tab")  # the text

    def at():
        return page.evaluate("+document.activeElement.dataset.token")

    found = [at()]
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowLeft", "End", "ArrowRight", "Home",
                "ArrowLeft", "ArrowUp"):  # fmt: skip
        page.keyboard.press(key)
        found.append(at())
    last = page.locator("[data-token]").count() - 1
    assert found == [0, 1, 9, 10, 9, 8, last, last, 0, 0, 0]
    assert page.locator("[aria-selected=true]").count() == 1
    assert "round" in page.locator("#detail").text_content()
    page.keyboard.press("Tab")  # on, to what scrolls: one stop for all tokens
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"


def test_a_screen_reader_finds_names_and_tables(opened):
    page = opened()
    assert page.get_by_role("listbox", name="The text, token by token").count() == 1
    assert page.get_by_role("option", name="plain, the target's own, round 4").count() == 1
    assert page.get_by_role("option", name="new line").count() == 1
    for name in ("Timeline", "Acceptance by position", "Speed against plain", "Heatmap"):
        assert page.get_by_role("img", name=name).count() == 1, name
    assert page.locator("#detail").get_attribute("aria-live") == "polite"
    for summary in page.locator("summary").all():
        summary.click()
    tables = page.get_by_role("table").all()
    assert [table.get_by_role("row").count() for table in tables] == [1 + 7, 1 + len(LINES)]
    assert page.get_by_role("columnheader", name="rejected drafts").is_visible()
    levels = page.evaluate("[...document.querySelectorAll('h1, h2')].map(h => h.tagName)")
    assert levels[0] == "H1" and set(levels[1:]) == {"H2"}


def test_it_prints(opened, tmp_path):
    page = opened(794, "dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#detail").is_hidden() and page.locator("#text").is_visible()
    assert page.locator(".key label").is_hidden()
    assert page.pdf(path=tmp_path / "page.pdf", print_background=True)[:5] == b"%PDF-"


def test_colours_have_contrast(opened):
    """WCAG AA: 4.5 for text on its ground, in both schemes."""
    luminance = """(colour) => { const [r, g, b] = colour.match(/[0-9.]+/g).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; }"""
    ratio = f"""(node) => {{ const light = {luminance}; let at = node, ground;
        do {{ ground = getComputedStyle(at).backgroundColor; at = at.parentElement; }}
        while (ground === 'rgba(0, 0, 0, 0)');
        const [a, b] = [light(getComputedStyle(node).color), light(ground)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }}"""
    for scheme in ("light", "dark"):
        page = opened(1440, scheme)
        for what in ("h1", "main > p", "#text .kept", "#text .own", "dt", "dd", "summary", "footer"):
            assert page.locator(what).first.evaluate(ratio) >= 4.5, (scheme, what)


# ---- without a browser: what is counted -------------------------------------------------------------------


def test_plain_steps_are_measured_or_said_to_be_estimated(tmp_path):
    def plain(lines, header):
        found = pages.plain_of(read(save(tmp_path / "t", lines, header)))
        return found and (round(found.seconds, 6), found.how.split(":")[0].split(" ")[0])

    assert plain(LINES, HEADER) == (0.01, "measured")
    header = HEADER | {"plain_seconds": None}
    assert plain(LINES, header) == (0.011, "estimated")
    few = [line_of(i, 1, 0, seconds=0.004 + i / 1000) for i in range(1, 4)]
    assert plain([*LINES, *few], header) == (0.0065, "median")
    assert plain([LINES[0]], header) is None
    assert plain([LINES[0], *few], header | {"drafter": None}) == (0.006, "this")


def test_survival_and_acceptance_are_of_the_rounds(tmp_path):
    rows = pages.acceptance(read(save(tmp_path / "t")))
    assert [row["reached"] for row in rows] == [4, 3, 2, 2, 1, 1, 1]
    assert [row["rate"] for row in rows] == pytest.approx([3 / 4, 2 / 3, 1, 1 / 2, 1, 1, 1])
    assert [row["survival"] for row in rows] == pytest.approx(
        [3 / 4, 2 / 4, 2 / 4, 1 / 3, 1 / 3, 1 / 3, 1 / 3]
    )


def test_break_even_is_a_rounds_cost_in_plain_steps(tmp_path):
    recording = read(save(tmp_path / "t"))
    found = pages.break_even(recording, pages.plain_of(recording))
    assert (found["cost"], found["needed"], found["tau"]) == pytest.approx((0.02, 2.0, 15 / 4))
    assert found["speed"] == pytest.approx(15 / 4 / 2)


def test_both_lanes_share_one_clock(tmp_path):
    recording = read(save(tmp_path / "t"))
    found = pages.timeline(recording, pages.plain_of(recording))
    assert (found["seconds"], found["plain_seconds"]) == pytest.approx((0.1, 0.16))
    assert found["end"] / found["seconds"] == pytest.approx(found["plain_end"] / found["plain_seconds"])
    assert sum(bar["width"] for bar in found["bars"]) == pytest.approx(found["end"])
    assert len(found["chips"]) == len(found["steps"]) == 16
    spans = [(at["x"], at["x"] + at["width"]) for at in found["bars"]]
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(spans))


@pytest.mark.parametrize("lines, header", [
    (LINES, None), (LINES[:1], HEADER), ([], HEADER), ([line_of(0, 0, 0), line_of(1, 1, 0)], None),
    ([line_of(i, 1, 0) for i in range(4)], HEADER | {"drafter": None}),
    ([{key: line[key] for key in NEEDED} for line in LINES], None),
    ([LINES[0], LINES[1] | {"sample": 1}, LINES[2] | {"seconds": 0, "stages": {}, "sample": 1}], HEADER),
    ([line_of(1, 4, 1, seconds=0, stages={})], HEADER | {"plain_seconds": 0}),
])  # fmt: skip
def test_every_kind_of_trace_has_a_page(lines, header, tmp_path):
    text = pages.render(read(save(tmp_path / "t", lines, header)), "t")
    assert text.count("data-token=") == sum(len(line["ids"]) for line in lines) and "</html>" in text
    assert not re.search(r"\b(?:nan|inf|None)\b", re.sub(r"(?s)<(script|style).*?</\1>", "", text))


def test_a_page_has_an_end(tmp_path):
    recording = read(save(tmp_path / "t", [LINES[0]] * (pages.MOST_ROUNDS + 1)))
    with pytest.raises(UserError, match="a page shows up to"):
        pages.render(recording, "t")
