"""What bench/MEASURED.md says of other programs beside this one. As bench/measured.py, which asks for it."""

from quote import at, begin, of, of_card, picture, prose, table


def programs(results, name):
    """The embedded pair in other programs on the CPU, the same prompts in one run (bench/peers/cpu.py)."""
    found = results[name]
    total = len(found["prompts"])
    yield from begin(f"Other programs on this CPU, the same {total} prompts", found)
    yield from prose(
        f"{found['threads']} threads, {found['tokens']} tokens each, {found['clock']} time; medians of "
        f"{found['repeat']} runs and half their range. A text differs where close logits fall otherwise."
    )
    if name == "peers-cpu":
        yield from picture(name, "Bars of tokens a second of each program and way")
    else:
        yield ""

    def row(one):
        return (
            one["program"], one["way"], f"{one['tokens_per_s']:.1f} ± {one['spread']:.1f}",
            "-" if one["tau"] is None else f"{one['tau']:.2f}", of(one["same_as_reference"], total),
            ", ".join(f"{name} `{version}`" for name, version in one["versions"].items()),
        )  # fmt: skip

    heads = "program", "way", "tok/s", "tau", "texts that are ours", "versions"
    yield from table(heads, map(row, found["ways"]))
    for what, why in found["failed"].items():
        yield from ("", f"{what}: {why}.")


def steps(results, card):
    """A step of the public loop and of transformers beside our rounds (bench/peers/gpu.py)."""
    found, ours = of_card(results, "peer", card), of_card(results, "round", card)
    versions, shape = found["versions"], ours[found["shape"]]
    step, token = found["dflash_step_ms"]["median"], found["transformers_token_ms"]["median"]
    ms, prefill = at(shape, found["context"])["ms"], shape["prefill"]
    yield from begin(
        f"Others on such a card, {found['shape']}'s shape, context {found['context']}", found, ours
    )
    yield from picture(f"peers-{card}", "Bars of a step of each program")
    prompt = found["dflash_prefill_ms"]["median"]
    yield from prose(
        f"A step of the public dflash {found['dflash']} loop takes {step:.1f} ms, "
        f"{step / ms['round_16']:.1f} times our round; a token of transformers' own generate {token:.1f} ms, "
        f"{token / ms['plain_round']:.1f} times our plain round; the prompt's pass {prompt:.0f} ms, ours "
        f"{prefill['ms']:.0f} ms of {prefill['tokens']} tokens (torch {versions['torch']}, "
        f"transformers {versions['transformers']})."
    )
