"""Pictures as text: the few SVG elements that bench/plots.py and bench/lesson.py draw with.

Written by hand, not by a plotting library: such a picture stays text that a diff shows, needs no dependency,
and follows the reader's light or dark page with the style below. Lengths are pixels of a page WIDTH wide,
so that a phone still shows letters. A series has a colour and a pattern or a word: never colour alone.
"""

import textwrap
from xml.sax.saxutils import escape, quoteattr

WIDTH, LINE = 640, 20
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px } .faint { fill: #6a737d } .bold { font-weight: 600 }
.code { font-family: monospace }
.axis { stroke: #8b949e; fill: none } .edge { stroke: #24292f; fill: none }
.blue { fill: #2f7ed8 } .orange { fill: #e07b00 } .grey { fill: #8b949e }
.pale { fill: #8b949e; fill-opacity: .25 }
.line { stroke-width: 2.5; fill: none }
.line-blue { stroke: #2f7ed8 } .line-orange { stroke: #e07b00 } .line-grey { stroke: #8b949e }
.on { fill: #fff } .struck { text-decoration: line-through }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .faint { fill: #9aa4af } .edge { stroke: #e6edf3 } .on { fill: #fff }
}
@media print { text { fill: #000 } .edge { stroke: #000 } .on { fill: #fff } }
"""


class Picture:
    """An SVG under way. title, description: what a reader who sees nothing hears."""

    def __init__(self, title, description):
        self.title, self.description, self.parts, self.height = title, description, [], 0

    def text(self, x, y, words, css="", anchor="start", width=None):
        """Words on a base line. width: pixels they are made to fill, whichever font the reader has."""
        fixed = f' textLength="{_n(width)}" lengthAdjust="spacingAndGlyphs"' if width else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._add(y, f'<text x="{_n(x)}" y="{_n(y)}"{_css(css)}{place}{fixed} xml:space="preserve">'
                     f"{escape(words)}</text>")  # fmt: skip

    def rect(self, x, y, width, height, css, round_=0):
        corner = f' rx="{round_}"' if round_ else ""
        box = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._add(y + height, f"<rect {box}{corner}{_css(css)}/>")

    def path(self, moves, css, dash=None):
        """moves: the text of a path's d."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<path d="{moves}"{_css(css)}{dashes}/>')

    def line(self, points, css, dash=None):
        """points: (x, y) each."""
        self.path("M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points), css, dash)

    def foot(self, words):
        """Small lines under everything: where the numbers are from."""
        for line in textwrap.wrap(words, 94):
            self.text(8, self.height + 18, line, "small faint")

    def lines(self):
        """The file's lines."""
        size = f'viewBox="0 0 {WIDTH} {_n(self.height + 10)}" width="{WIDTH}" height="{_n(self.height + 10)}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(self.title)}>'
        yield f"<title>{escape(self.title)}</title>"
        yield f"<desc>{escape(self.description)}</desc>"
        yield f"<style>{STYLE}</style>"
        yield from self.parts
        yield "</svg>"

    def _add(self, bottom, part):
        self.height = max(self.height, bottom)
        self.parts.append(part)


def _n(number):
    """A length with one digit at most."""
    return f"{number:.1f}".removesuffix(".0")


def _css(names):
    return f' class="{names}"' if names else ""
