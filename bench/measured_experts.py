"""What bench/MEASURED.md says of targets with experts: steps, bytes they touched, how many rows pay."""

from quote import begin, of_card, prose, table

ROUTINGS = {"random": "each row by itself", "alike": "all rows alike"}


def steps(results, card):
    """bench/moe.py: a table a shape."""
    found = of_card(results, "moe", card)
    yield from begin("Targets with experts, random weights of true shape", found)
    yield from prose(
        f"Copy {found['copy_tb_per_s']:.2f} TB/s in the same run. GB are what was read: dense weights, the "
        "experts that had rows (counted on the device), keys, head, drafter. A round pays from its tau on: "
        "its time over a plain step's."
    )
    heads = "routing", "step", "experts a layer", "GB", "ms", "of its floor", "pays from tau"
    for name, one in found.items():
        if not (isinstance(one, dict) and "parts" in one):
            continue
        prompt = one["prefill"]
        words = f"**{name}**, {one['weights_gb']:.1f} GB of weights; a prompt of {prompt['tokens']} tokens "
        yield from ("", words + f"takes {prompt['ms']:.0f} ms.", "")
        plain = {part["routing"]: part["ms"] for part in one["parts"] if part["part"] == "plain_round"}
        yield from table(heads, (_row(part, plain[part["routing"]]) for part in one["parts"]))


def _row(part, plain):
    is_round = part["part"].startswith("round")
    return (
        ROUTINGS[part["routing"]], part["part"].replace("_", " "),
        f"{part['experts']:.1f}", f"{part['gb']:.2f}", f"{part['ms']:.2f}",
        f"{part['of_floor']:.0%}", f"{part['ms'] / plain:.2f}" if is_round else "-",
    )  # fmt: skip


def kernels(results, where):
    """bench/experts.py: the three kernels of a layer."""
    found = results[f"experts-{where}"]
    copy = found["copy_gb_s"]
    yield from begin("Kernels of a layer with experts", found)
    yield from prose(f"Copy {copy:.0f} GB/s in the same run; bytes are those of the experts that have rows.")
    yield ""

    def row(one):
        up, down = (
            f"{one[f'{part}_us']:.1f} ({one[f'{part}_bytes'] / one[f'{part}_us'] / 1e3 / copy:.0%})"
            for part in ("up", "down")
        )
        return (
            one["model"], str(one["rows"]), ROUTINGS[one["routing"]], f"{one['touched']:.0f}",
            f"{one['route_us']:.1f}", up, down, f"{one['layer_us']:.1f}",
        )  # fmt: skip

    heads = (
        "shape",
        "rows",
        "routing",
        "experts",
        "route us",
        "up us (of copy)",
        "down us (of copy)",
        "all us",
    )
    yield from table(heads, map(row, found["results"]))
