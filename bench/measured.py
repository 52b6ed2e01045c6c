"""What bench/MEASURED.md says of each kind of result: a function a section, which yields lines.

Every number of a section comes out of the results it is given, verdicts too: so many of so many. A section
whose result is refused (bench/quote.py), or that counted nothing, is left out as a whole.
bench/report.py puts them together.
"""

import measured_experts
import measured_load
import measured_peers
from quote import at, begin, of, of_card, picture, prose, source, table

CARDS = {
    "h200": "nvidia-h200",
    "h100": "nvidia-h100-80gb-hbm3",
}  # as files are named: by bench/all.sh, by the driver


# -- CPU


def cpu_speed(results):
    found = results["cpu"]
    machine, costs = found["machine"], found["costs"]
    yield from begin(f"Embedded pair, {machine['cores']} cores ({machine['processor']})", found)
    yield from prose(
        f"{found['tokens']} tokens at most; medians of {found['repeat']} runs and half their range."
    )
    yield from picture("speed-cpu", "Bars of tokens a second by kind of prompt")
    heads = (
        "prompts",
        "plain tok/s",
        "`--verify auto` tok/s",
        "over plain",
        "tau (auto)",
        "`--verify 16` tok/s",
        "tau",
    )

    def row(kind):
        full = [one for one in found["full_block"] if one["kind"] == kind["kind"]]
        return (
            f"{kind['kind']} ({kind['prompts']})",
            f"{kind['plain_tokens_per_s']:.0f} ± {kind['plain_spread']:.0f}",
            f"{kind['drafted_tokens_per_s']:.0f} ± {kind['drafted_spread']:.0f}",
            f"{kind['speedup']:.2f}", f"{kind['tau']:.2f}",
            f"{sum(one['tokens_per_s'] for one in full) / len(full):.0f}",
            f"{sum(one['tau'] for one in full) / len(full):.2f}",
        )  # fmt: skip

    yield from table(heads, map(row, found["kinds"]))
    yield ""
    same = sum(one["is_lossless"] for one in found["prompts"])
    yield from prose(
        f"{of(same, len(found['prompts']), 'prompts gave the plain text')}. A verify pass takes "
        f"{costs['verify_1_ms']:.1f} / {costs['verify_4_ms']:.1f} / {costs['verify_8_ms']:.1f} / "
        f"{costs['verify_16_ms']:.1f} ms at 1 / 4 / 8 / 16 rows (16 over 1: {costs['rows_16_over_1']:.2f}; "
        f"one row reads weights at {costs['weights_gb_per_s_at_1']:.0f} GB/s), a draft "
        f"{costs['draft_ms']:.1f} ms, an injection {costs['inject_ms']:.2f} ms: a whole block breaks even at "
        f"tau {costs['break_even_tau_at_16']:.2f}. Loading takes {found['load_s']:.1f} s, the kernels "
        f"{found['jit_s']:.1f} s from the disk cache; peak memory {found['peak_rss_mib']} MiB."
    )


def pair_speed(results, name, title, drawn=None):
    """What `minidflash bench` says (bench/embedded.py)."""
    found = results[name]
    yield from begin(title, found)
    yield from prose(
        f"On {found['on']}; {found['max_tokens']} tokens at most; medians of {found['repeat']} runs."
    )
    yield from picture(drawn, "Bars of tokens a second by kind of prompt") if drawn else [""]
    yield from table(
        ("prompts", "plain tok/s", "drafted tok/s", "over plain", "tau"),
        (
            (f"{row['kind']} ({row['prompts']})", f"{row['plain_tokens_per_s']:.0f}",
             f"{row['drafted_tokens_per_s']:.0f}", f"{row['speedup']:.2f}", f"{row['tau']:.2f}")
            for row in found["rows"]
        ),
    )  # fmt: skip


def soak(results):
    found = results["soak-cpu"]
    yield from begin("Memory over many rounds", found)
    yield from table(
        ("rule", "rounds", "texts", "tokens", "ids out of range", "grown, MiB"),
        (
            (rule, f"{one['rounds']:,}", f"{one['texts']:,}", f"{one['tokens']:,}",
             of(one["out_of_range"], one["tokens"]), f"{one['grown_mib']:.1f}")
            for rule, one in found.items() if isinstance(one, dict) and "grown_mib" in one
        ),
    )  # fmt: skip


def block_rule(results):
    found = results["block-rule"]
    yield from begin("What block verification would keep more than rejection row by row", found)

    def row(one):
        law = ", ".join(f"{key} {value}" for key, value in one["law"].items())
        more = (1 + one["kept_block_rule"]) / (1 + one["kept_row_by_row"]) - 1
        return law, str(one["verify"]), str(one["rounds"]), f"{1 + one['kept_row_by_row']:.3f}", f"{more:.1%}"

    heads = "law", "verify", "rounds", "tokens a round, row by row", "more by block verification"
    yield from table(heads, map(row, found["results"]))


# -- drafted text against plain text, on all machines


def lossless(results, where, names):
    yield from begin(f"Drafted runs against plain ones, {where}")

    def row(name):
        found = results[name]
        settings, prompts = found["settings"], found["prompts"]
        pairs = ", ".join(settings.get("pairs", ["embedded"]))
        texts = (
            f"{settings['seeds']} seeds of each pair" if settings.get("seeds") else f"{len(prompts)} prompts"
        )
        what = (
            f"{'sampled' if settings.get('seeds') else 'greedy'}, {settings['activations']}: {pairs}; "
            f"{texts}, {settings['tokens']} tokens, blocks {', '.join(map(str, settings['blocks']))}"
        )
        seen, block = found["accepted_at_block_16_replay"], max(settings["blocks"])
        yield (
            what, of(found["differing"], found["runs"]), f"{found['tokens_compared']:,}",
            of(sum(count > 0 for count in seen.values()), block), source(found),
        )  # fmt: skip

    rows = [cells for name in names for cells in results.quoted(row(name))]
    yield from table(("what", "runs that differ", "tokens compared", "accepted lengths seen", "from"), rows)


def acceptance(results, card):
    """How far into a block drafts are kept (of the runs that lossless compares)."""
    found = of_card(results, "lossless-embedded", card)
    differing = of(found["differing"], found["runs"])
    yield from begin("How deep into a block drafts are kept, embedded pair, block 16", found)
    yield from prose(f"Of the runs at block 16; {differing} runs differ from plain decoding.")
    yield from picture(f"acceptance-{card}", "Share of rounds that keep a position, by kind of prompt")


# -- GPU

PARTS = {  # of a round: how it is called, which floor it has
    "plain_round": ("plain round", "plain"), "verify_4": ("verify, 4 rows", "plain"),
    "verify_16": ("verify, 16 rows", "plain"), "draft": ("draft with head", "draft"),
    "round_16": ("whole round, block 16", "round"),
    "round_16_sampled_top_p": ("the same, temperature 0.7, top-p 0.9", "round"),
    "round_16_sampled_top_k": ("the same, top-k 50 too", "round"),
}  # fmt: skip


def whole_rounds(results, card):
    found = of_card(results, "round", card)
    shape = found["qwen3-8b"]
    prefill, some = shape["prefill"], at(shape, 2048)["ms"]
    yield from begin("Rounds of Qwen3-8B's shape, random weights", found)
    yield from prose(
        f"One {found['card']}, bf16; ms, and how much of it the floor is, the bytes over the copy's "
        f"{found['copy_tb_per_s']:.2f} TB/s of the same run."
    )
    yield from picture(f"round-{card}", "Bars of a round's time by context, and its floor")
    yield from table(
        ("context", *(str(one["context"]) for one in shape["contexts"])),
        (
            (name, *(f"{one['ms'][part]:.2f} ({one['floor_ms'][floor] / one['ms'][part]:.0%})"
                     for one in shape["contexts"]))
            for part, (name, floor) in PARTS.items()
        ),
    )  # fmt: skip
    yield ""
    yield from prose(
        f"Injecting 16 rows into the drafter's caches at context 2048 takes {some['inject']:.2f} ms, a "
        f"prompt of {prefill['tokens']} tokens {prefill['ms']:.0f} ms; between two rounds of the loop the "
        f"GPU waits {shape['host_gap_us']:.1f} us."
    )
    if "lossless" in shape:
        same = shape["lossless"]
        blocks = {key.removeprefix("block_"): one for key, one in same.items() if key.startswith("block_")}
        lengths = sum(count > 0 for one in blocks.values() for count in one["accepted"].values())
        yield from prose(
            f"Drafted runs of {same['tokens']} tokens at blocks {', '.join(blocks)}: "
            f"{of(sum(one['is_same'] for one in blocks.values()), len(blocks), 'gave the plain ids')}; "
            f"{of(lengths, sum(map(int, blocks)), 'accepted lengths occurred')}."
        )


def other_shapes(results, card):
    found = of_card(results, "round-others", card)
    shapes = {name: one for name, one in found.items() if isinstance(one, dict) and "contexts" in one}
    yield from begin("Rounds of other shapes at context 2048, ms", found)

    def row(name, shape):
        one = at(shape, 2048)
        ms, floor = one["ms"], one["floor_ms"]["round"]
        return (
            name, *(f"{ms[part]:.2f}" for part in ("plain_round", "verify_16", "draft", "round_16")),
            f"{floor:.2f} ({floor / ms['round_16']:.0%})", f"{shape['prefill']['ms']:.0f}",
        )  # fmt: skip

    tokens = next(iter(shapes.values()))["prefill"]["tokens"]
    heads = (
        "shape",
        "plain round",
        "verify, 16 rows",
        "draft",
        "whole round",
        "floor of it",
        f"prompt of {tokens}",
    )
    yield from table(heads, (row(name, shape) for name, shape in shapes.items()))


def loops(results, card):
    found = of_card(results, "loops", card)
    shapes = {name: one for name, one in found.items() if isinstance(one, dict) and "is_same" in one}
    ways = list(dict.fromkeys(way for one in shapes.values() for way in one["ms"]))
    same = sum(one["is_same"] for one in shapes.values())
    yield from begin("Who starts the next round", found)
    yield from prose(
        f"ms a round of 16 rows from context {found['context']}, {found['rounds']} on end, each record read "
        f"by the host; {of(same, len(shapes), 'shapes gave the same ids in all ways')}."
    )
    yield ""
    rows = (
        (name, *(f"{one['ms'].get(way, float('nan')):.3f}" for way in ways)) for name, one in shapes.items()
    )
    yield from table(("shape", *ways), rows)


def timeline(results, name, shape):
    found = results[name]
    round_ = found["round_16"]
    context = f", context {found['context']}" if "context" in found else ""
    yield from begin(f"Where a round's {round_['us'] / 1e3:.2f} ms go, {shape}{context}", found)
    yield from prose("Kernels note the GPU's clock.")
    yield from picture(name, "A lane for each kernel of the round")
    yield from table(
        ("kernel", "launches", "us each", "ms"),
        (
            (one["kernel"], str(one["launches"]), f"{one['median_us']:.1f}", f"{one['adds_us'] / 1e3:.2f}")
            for one in round_["kernels"]
        ),
    )


def loading(results, card):
    found = of_card(results, "load", card)
    best = max(found["loads"], key=lambda one: one["gb_per_s"])
    yield from begin("Loading", found)
    yield from prose(
        f"{found['gb']:.1f} GB of safetensors from the page cache to packed device memory take "
        f"{found['gb'] / best['gb_per_s']:.2f} s: {best['gb_per_s']:.1f} GB/s, {best['of_pinned']:.0%} of "
        f"the {found['pinned_gb_per_s']:.1f} GB/s from pinned memory in the same run ({best['threads']} "
        f"threads, {best['piece_mb']} MB a piece)."
    )


def prompt_products(results, card):
    found = of_card(results, "prefill-gemm", card)
    rows = max(one["rows"] for one in found["results"])
    yield from begin(f"Products of a prompt of {rows} rows, by shape", found)
    yield from table(
        ("N x K", "us", "TFLOP/s", "of cuBLAS"),
        (
            (f"{one['outputs']} x {one['cols']}", f"{one['us']:.0f}", f"{one['tflop_s']:.0f}",
             f"{one['cublas_us'] / one['us']:.2f}")
            for one in found["results"] if one["rows"] == rows
        ),
    )  # fmt: skip


def products(results, card):
    found = results[f"kernels-{CARDS[card]}"]
    yield from begin("Products at few rows, us", found)
    yield from prose(
        f"Bare, and with what is fused into them; cuBLAS has the product alone. The copy ran at "
        f"{found['copy_gb_s'] / 1e3:.2f} TB/s."
    )
    yield ""
    calls = {}  # of one model: two may call products of one shape, each with heads of its own
    for one in found["results"]:
        if "outputs" in one:
            calls.setdefault((one["model"], one["row"]), {})[one["rows"]] = one

    def row(model, name, by):
        one = by[16]
        return (
            model, name, f"{one['outputs']} x {one['cols']}", f"{one['bytes'] / 1e6:.0f}",
            f"{by[1]['us']:.1f}",
            f"{one['us']:.1f}", f"{one['bare_us']:.1f}",
            f"{one['bytes'] / one['bare_us'] / 1e3 / found['copy_gb_s']:.0%}", f"{one['cublas_us']:.1f}",
            f"{one['cublas_us'] / one['bare_us']:.2f}",
        )  # fmt: skip

    heads = "model", "product", "N x K", "MB", "1 row", "16 rows", "bare", "of copy", "cuBLAS", "over bare"
    yield from table(heads, (row(*key, by) for key, by in calls.items()))


def attention(results, card):
    found = results[f"attend-{CARDS[card]}"]
    yield from begin("Attention, us a call in a chain as in a layer, the variant in use then", found)
    times = {}
    for one in found["results"]:
        if one["rows"] <= 16:
            key = tuple(one["heads"]), one["rows"]
            times.setdefault(key, {})[one["context"]] = one["variants_us"].get("the default")
    contexts = sorted({context for by in times.values() for context in by})
    rows = (
        ("/".join(map(str, heads)), str(count), *(f"{by[c]:.1f}" if by.get(c) else "-" for c in contexts))
        for (heads, count), by in times.items()
    )
    yield from table(("H/G/K", "rows", *map(str, contexts)), rows)


def checks(results, name):
    """The tests of the cuda backend and the golden pair (bench/gpu_check.py)."""
    found = results[name]
    parts = {what: one for what, one in found.items() if isinstance(one, dict)}
    tests = {what: one for what, one in parts.items() if "failures" in one}
    yield from begin(f"Tests on the card, {found['commit']}", found)
    if tests:
        rows = (
            (what, *(str(one.get(key, 0)) for key in ("passed", "failed", "skipped")),
             "; ".join(f"`{text}`" for text in one["failures"]))
            for what, one in tests.items()
        )  # fmt: skip
        yield from table(("part", "passed", "failed", "skipped", "what failed"), rows)
    for what, one in parts.items():
        if "wrong" in one and "runs" in one:
            tau = f"; tau {one['bf16']} in bf16, {one['f32']} in f32" if "ratio" in one else ""
            yield from prose(f"- {what}: {of(len(one['wrong']), one['runs'], 'runs wrong')}{tau}.")


def sanitizer(results, name):
    found = results[name]
    yield from begin(f"compute-sanitizer, {found['commit']}", found)
    yield from prose(f"{found['compute_sanitizer'].strip()}, over the kernel tests' small shapes.")
    yield ""

    def row(check, parts):
        planted = parts.pop("planted")["is_clean"]
        dirty = [f"{part}: {one['words']}" for part, one in parts.items() if not one["is_clean"]]
        passed = sum(one["passed"] for one in parts.values())
        return (
            check, of(len(parts) - len(dirty), len(parts)), str(passed),
            "found" if planted else "NOT found", "; ".join(dirty),
        )  # fmt: skip

    heads = "check", "parts clean", "tests passed", "mistake planted for it", "what is not clean"
    yield from table(heads, (row(check, dict(one["parts"])) for check, one in found["checks"].items()))


SAMPLED = "lossless-sampled", "lossless-sampled-golden-bf16", "lossless-sampled-golden-f32"


def sections(results):
    """(heading, its sections) of every machine."""
    yield "CPU", [
        cpu_speed(results), *(measured_peers.programs(results, name) for name in results.names("peers-cpu*")),
        pair_speed(results, "cpu-high-tau", "Where drafts fit"),
        lossless(results, "CPU", ["lossless-cpu", *(f"{name}-cpu" for name in SAMPLED)]), block_rule(results),
        measured_load.curve(results, "curve-cpu"), soak(results),
        *(measured_load.serving(results, name) for name in results.names("soak-serve-*cpu")),
    ]  # fmt: skip
    for card, where in CARDS.items():
        texts = [f"{name}-{card}" for name in ("lossless-embedded", *SAMPLED)]
        stamped = {
            name: name.split("-", 1)[1].rsplit("-", 1)[0] for name in results.names(f"timeline-*-{card}")
        }
        yield f"GPU: {card.upper()}", [
            whole_rounds(results, card), other_shapes(results, card), measured_experts.steps(results, card),
            measured_experts.kernels(results, where), loops(results, card),
            *(timeline(results, name, shape) for name, shape in stamped.items()), loading(results, card),
            prompt_products(results, card), measured_peers.steps(results, card), products(results, card),
            measured_load.many_rows(results, card), measured_load.together(results, card),
            measured_load.together(results, card, "steps-fp8"),
            attention(results, card),
            pair_speed(results, f"embedded-{card}", "Embedded pair", f"speed-{card}"),
            acceptance(results, card),
            *(measured_load.curve(results, name) for name in results.names(f"curve-*{card}")),
            *(measured_load.serving(results, name) for name in results.names(f"soak-serve-*{card}")),
            lossless(results, card.upper(), texts),
            *(checks(results, name) for name in results.names(f"gpu-check-*{card}")),
            *(sanitizer(results, name) for name in results.names(f"sanitizer-*{card}")),
        ]  # fmt: skip
