"""What bench/MEASURED.md says of many requests at once, and of the server under them. As bench/measured.py,
which asks for it."""

from quote import begin, of, of_card, picture, prose, table

ALLOWED = 0.97  # of plain's tokens a second: less is slower


def called(width):
    """A width of bench/curve.py in words."""
    return {"1": "plain", "auto": "auto"}.get(width, f"v = {width}")


def over_plain(point):
    """How many times plain's tokens a second at this load; None where plain was not measured."""
    return point["plain_tokens_per_s"] and point["tokens_per_s"] / point["plain_tokens_per_s"]


def curve(results, name):
    """A closed loop at several loads, plain and by rows verified (bench/curve.py)."""
    found = results[name]
    points, settings = found["points"], found["settings"]
    differing = of(found["differing"], found["texts"], "texts differ")
    yield from begin(f"Many requests at once, {found['pair']}", found)
    yield from prose(
        f"On {found['on']}, a closed loop: a text that ends is replaced by the next prompt. "
        f"{settings['least_texts']} texts of {settings['max_tokens']} tokens at most, or three a place; "
        f"runs of a point: {settings['repeat']}, their median. {differing} from plain decoding of their "
        f"prompt alone."
    )
    if settings["accept"] is not None:
        yield from prose(f"Drafts are made right with a chance of {settings['accept']} each.")
    yield from picture(name, "Tokens a second of all requests over those of one, by width")

    def row(one):
        over = over_plain(one)
        return (
            str(one["concurrency"]), called(one["width"]), f"{one['tokens_per_s']:.0f}",
            "-" if over is None else f"{over:.2f}",
            f"{one['user_tokens_per_s']:.0f}", f"{one['slowest_user_tokens_per_s']:.0f}",
            f"{one['first_token_ms']:.0f}", f"{one['slowest_first_token_ms']:.0f}", f"{one['tau']:.2f}",
            f"{one['lanes']:.1f}", f"{one['rows_a_pass']:.1f}",
        )  # fmt: skip

    share = settings["slowest_percent"]
    heads = (
        "requests at a time", "way", "tok/s of all", "over plain", "tok/s of one", f"slowest {share}%",
        "first token, ms", f"slowest {share}%", "tau", "lanes a pass", "rows a pass",
    )  # fmt: skip
    yield from table(heads, map(row, points))
    auto = [one for one in points if one["width"] == "auto" and one["plain_tokens_per_s"]]
    if auto:
        over = [over_plain(one) for one in auto]
        kept = of(sum(one >= ALLOWED for one in over), len(over), "loads")
        yield ""
        yield from prose(
            f"Auto is no slower than plain, within three per cent, at {kept}; at worst {min(over):.2f} times "
            f"plain's tokens a second, at best {max(over):.2f} times."
        )


def serving(results, name):
    """`minidflash serve` under clients of whom some leave and some send no request (bench/soak_serve.py)."""
    found = results[name]
    ends = found["sigterm"]
    wrong = of(found["texts_wrong"], found["texts_checked"], "texts were not")
    right = of(sum(one["right"] for one in ends), sum(one["under_way"] for one in ends), "got theirs")
    refused = of(sum(one["is_refused"] for one in ends), len(ends), "times")
    codes = ", ".join(str(one["code"]) for one in ends)
    yield from begin(f"A server under many clients, {found['pair']} pair", found)
    yield from prose(
        f"{found['connections']} connections; {wrong} what `generate` gives alone. "
        f"SIGTERM came while clients waited for a text: {right}, later ones were refused {refused}; exit "
        f"codes {codes}."
    )
    yield ""
    heads = (
        "requests", "clients that left", "bodies that were no request", "memory before, MiB", "after, MiB",
        "slots free at the end",
    )  # fmt: skip
    yield from table(heads, [(
        f"{found['requests']:,}", f"{found['disconnects']:,}", f"{found['garbage']:,}",
        f"{found['memory_before_mib']:.1f}", f"{found['memory_after_mib']:.1f}",
        of(found["slots_free"], found["slots"]),
    )])  # fmt: skip


def together(results, card, of_what="steps"):
    """Steps of several sequences in one pass (bench/steps.py)."""
    found = of_card(results, of_what, card)
    kind = found.get("fp8", "none")
    weights = {"none": "", "target": ", a target in FP8", "both": ", weights in FP8"}[kind]
    yield from begin(
        f"Steps of several sequences, {found['shape']}'s shape{weights}, context {found['context']}", found
    )
    yield from prose(
        f"A whole round on the GPU, {found['fresh']} features a sequence injected; the floor is the bytes of "
        f"weights and keys once, at the copy's {found['copy_tb_per_s']:.2f} TB/s. Narrow passes hold 8 to 32 "
        f"rows and read the weights again for more."
    )
    yield ""
    heads = "sequences", "rows of each", "ms", "in narrow passes, ms", "floor, ms", "of the floor"

    def row(one):
        narrow = one.get("skinny_ms")
        return (
            str(one["lanes"]), "plain" if one["width"] == 1 else str(one["width"]), f"{one['ms']:.2f}",
            "-" if narrow is None else f"{narrow:.1f}", f"{one['floor_ms']:.2f}",
            f"{one['floor_ms'] / one['ms']:.0%}",
        )  # fmt: skip

    yield from table(heads, map(row, found["steps"]))


def many_rows(results, card):
    """Products of many rows with the skinny family's bits (bench/wide.py)."""
    found = of_card(results, "wide", card)
    same = [one["same_bits_as_skinny"] for one in found["results"] if one["same_bits_as_skinny"] is not None]
    yield from begin("Products of many rows, us", found)
    yield from prose(
        f"The product alone, and the whole row with the laying of its tokens and its end. "
        f"{of(sum(same), len(same), 'rows wrote the bits of narrow passes')}. The copy ran at "
        f"{found['copy_gb_s'] / 1e3:.2f} TB/s."
    )
    yield ""
    heads = "product", "rows", "us", "of cuBLAS", "whole row", "in narrow passes"

    def row(one):
        whole = one["row_us"]
        return (
            one["product"], str(one["rows"]), f"{one['product_us']:.1f}",
            f"{one['cublas_us'] / one['product_us']:.2f}", "-" if whole is None else f"{whole:.1f}",
            f"{one['skinny_row_us']:.1f}",
        )  # fmt: skip

    yield from table(heads, map(row, found["results"]))
