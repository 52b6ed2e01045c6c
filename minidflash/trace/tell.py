"""`minidflash trace FILE` in a terminal: rounds line by line, one of them row by row, the text, a summary."""

from ..cli.terminal import duration
from ..errors import printable
from ..stats import Stats

BARS = " ▁▂▃▄▅▆▇█"


def tell_round(number, line, paint):
    """One line about one round."""
    ids = pieces(line, "id_texts", "ids")
    drafts = pieces(line, "draft_texts", "drafts")
    kept = min(line["accepted"], len(ids))
    words = [paint("kept", piece) for piece in ids[:kept]]
    words += [paint("own", f"[{piece}]") for piece in ids[kept:]]
    words += [paint("rejected", f"~{piece}~") for piece in drafts[line["accepted"] :]]
    if line["verify"] == 0:
        what = "prefill"
    elif line["verify"] == 1:
        what = "plain"
    else:
        what = f"kept {line['accepted']} of {len(drafts)}"
    if "experts" in line:
        words.append(paint("faint", f" ({line['experts']:.1f} experts a layer)"))
    end = f"  ({line['finish_reason']})" if line["finish_reason"] else ""
    return f"{number:4}  {what:<13} {duration(line['seconds']):>9}  {' '.join(words)}{paint('faint', end)}"


def tell_rows(line, paint):
    """Lines about one round, position by position: drafted, wanted by the target, why it stopped."""
    if "choice" not in line:
        return ["      this trace does not say what the target wanted: it was written by an older version"]
    drafts = [None, *pieces(line, "draft_texts", "drafts")]
    wanted, margins = pieces(line, "choice_texts", "choice"), line["margins"] or [None] * len(line["choice"])
    stages = [f"{name} {duration(seconds)}" for name, seconds in line["stages"].items()]
    at = f"      anchor {line['anchor']} at position {line['start']}"
    lines = [f"{at}, {line['injected']} context features injected", f"      {', '.join(stages)}"]
    width = max(map(len, [*drafts[1:], "drafted"]))
    most = max(map(len, [*wanted, "wanted"]))
    lines.append(f"      {'position':>8}  {'drafted':<{width}}  {'wanted':<{most}}  {'margin':>8}")
    for row, (want, margin) in enumerate(zip(wanted, margins, strict=True)):
        draft = drafts[row + 1] if row + 1 < len(drafts) else ""
        style, verdict = verdict_of(line, row)
        far = "" if margin is None else f"{margin:.3g}"
        cells = f"{row + 1:8}  {paint(style, draft)}{'':{width - len(draft)}}"
        lines.append(f"      {cells}  {want:<{most}}  {far:>8}  {verdict}")
    return lines


def verdict_of(line, row):
    """(style, words): what became of the draft behind a row of a round, and of the target's choice there."""
    kept, drafts, left = line["accepted"], len(line["drafts"]), len(line["ids"])
    if row > kept:
        return "rejected", "not looked at: it follows a rejected draft"
    is_cut = row >= left
    if row < kept:
        return "kept", f"kept, and cut off: the run ended ({line['finish_reason']})" if is_cut else "kept"
    if is_cut:
        return "own", f"cut off: the run ended ({line['finish_reason']})"
    if line.get("choice", line["ids"])[row] is None:
        return "rejected", "the target's logits were not finite"
    if row < drafts:
        return "rejected", "rejected: the target wanted another, and the round stopped here"
    return "own", "the target's own token" + (": all drafts were kept" if drafts else "")


def pieces(line, texts, ids):
    """Texts of ids, control characters made visible; the ids themselves where there is none."""
    found = line.get(texts) or [""] * len(line[ids])
    return [
        printable(piece).replace(" ", "·") or ("-" if i is None else str(i))
        for i, piece in zip(line[ids], found, strict=True)
    ]


def tell_text(lines, paint):
    """The text, coloured by who produced it; in brackets what the target did where there is no colour."""
    words = []
    for line in lines:
        texts = line.get("id_texts") or [f"{i} " for i in line["ids"]]
        for i, text in enumerate(printable(text, keep="\n\t") for text in texts):
            if i < line["accepted"]:
                words.append(paint("kept", text))
            else:
                words.append(paint("own", text) if paint.is_on else f"[{text}]")
    return "".join(words)


def summary(recording):
    """Closing lines: tau, acceptance by position as bars, seconds."""
    rounds = recording.rounds
    tokens, seconds = sum(len(r.tokens) for r in rounds), sum(r.seconds for r in rounds)
    block = max((r.verify for r in rounds), default=0)
    if block <= 1:
        return [f"{tokens} tokens, plain decoding, {duration(seconds)}"]
    stats = Stats.of(rounds, block)
    found = (
        f"{tokens} tokens in {stats.round_count} rounds: tau {stats.tau:.2f} (the target's own token "
        f"counted), {stats.accepted} of {stats.drafted} drafts accepted, {duration(seconds)}"
    )
    bars = "".join(BARS[round(8 * a)] if a is not None else "-" for a in stats.acceptance_by_position)
    numbers = " ".join("-" if a is None else f"{a:.2f}" for a in stats.acceptance_by_position)
    return [found, f"accepted / reached by position 1..{block - 1}: {bars}  {numbers}"]
