"""Which results may be quoted, and how: a number never without its file, commit, date and command."""

import json
import textwrap
from pathlib import Path

from record import CHANGES, RESULTS

HEAD = "date", "commit", "command", "machine"


class Refused(Exception):
    """A result that must not be quoted, and why."""


class Results:
    """What may be quoted of a folder of results. left_out: why the rest was not, a line each."""

    def __init__(self, folder=RESULTS):
        self.folder, self.left_out = Path(folder), []

    def names(self, pattern):
        """Names of the results there that fit a pattern, in order."""
        return sorted(path.stem for path in self.folder.glob(f"{pattern}.json"))

    def __getitem__(self, name):
        """A result, and its name under "name". Refused: it is not there, its head is not whole,
        its tree was dirty."""
        try:
            found = json.loads((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            raise Refused(f"{name}: not measured") from None
        if missing := [key for key in HEAD if not found.get(key)]:
            raise Refused(f"{name}: does not say its {', '.join(missing)}")
        if found["commit"].endswith(CHANGES):
            raise Refused(f"{name}: measured on a tree with changes ({found['commit']})")
        return found | {"name": name}

    def quoted(self, lines):
        """The lines of a generator as a list; none of them where it needs a result that is refused."""
        try:
            return list(lines)
        except Refused as why:
            self.left_out += [str(why)] if str(why) not in self.left_out else []
            return []


def source(found):
    """Where numbers come from: file, commit, date, command."""
    return f"`bench/results/{found['name']}.json`: {found['commit']}, {found['date']}, `{found['command']}`"


def origin(found):
    """The short of it, for a page that leads to the whole."""
    return f"`{found['name']}`: {found['commit']}, {found['date']}"


def prose(text):
    return textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False)


def begin(title, *results):
    yield from (f"### {title}", "")
    if results:
        yield from prose(f"From {'; '.join(map(source, results))}.")
        yield ""


def picture(name, words):
    """Lines that show docs/NAME.svg (bench/plots.py). words: what it shows."""
    yield from ("", f"![{words}](../docs/{name}.svg)", "")


def table(heads, rows):
    """A table's lines; a row is a list of cells."""
    rows = list(rows)
    if not rows:
        raise Refused(f"{heads[0]}: no rows")
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def of(count, total, what=""):
    """So many of so many, in numbers. Refused where there was nothing to count."""
    if total <= 0:
        raise Refused(f"{what or 'a count'}: nothing was counted")
    return f"{count:,} of {total:,} {what}".rstrip()


def of_card(results, name, card):
    """The result NAME-CARD, which must not be another card's."""
    found = results[f"{name}-{card}"]
    if card.lower() not in str(found.get("card", card)).lower():
        raise Refused(f"{found['name']}: measured on {found['card']}")
    return found


def at(shape, context):
    """The numbers of a shape at a context."""
    for one in shape["contexts"]:
        if one["context"] == context:
            return one
    raise Refused(f"context {context}: not measured")
