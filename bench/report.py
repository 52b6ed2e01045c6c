"""The measured tables of the README, from bench/results: python bench/report.py [--write]

With --write they replace what stands between the README's two marks.
"""

import argparse
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
MARK, END = "<!-- measured: bench/report.py -->", "<!-- end of measured -->"


# As files are named: by bench/all.sh, by the driver.
CARDS = {"h200": "nvidia-h200", "h100": "nvidia-h100-80gb-hbm3"}


def load(name):
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def cpu():
    found = load("cpu")
    c, m = found["costs"], found["machine"]
    yield f"### CPU: the embedded pair, {m['cores']} cores ({m['processor']}), f32 activations, bf16 weights"
    yield ""
    yield f"`{found['command']}` at {found['commit']}; {found['tokens']} tokens at most, medians of {found['repeat']} and half the range."
    yield ""
    yield "| prompts | plain tok/s | `--verify auto` tok/s | over plain | tau (auto) | `--verify 16` tok/s | tau |"
    yield "|---|---|---|---|---|---|---|"
    for row in found["kinds"]:
        full = [one for one in found["full_block"] if one["kind"] == row["kind"]]
        speed = sum(one["tokens_per_s"] for one in full) / len(full)
        tau = sum(one["tau"] for one in full) / len(full)
        yield (
            f"| {row['kind']} ({row['prompts']}) | {row['plain_tokens_per_s']:.0f} ± {row['plain_spread']:.0f} | "
            f"{row['drafted_tokens_per_s']:.0f} ± {row['drafted_spread']:.0f} | {row['speedup']:.2f} | {row['tau']:.2f} | "
            f"{speed:.0f} | {tau:.2f} |"
        )
    high = load("cpu-high-tau")
    row = high["rows"][0]
    yield ""
    yield (
        f'Where drafts fit ("{high["prompt"]}", tau {row["tau"]:.1f}, median of {high["repeat"]}): '
        f"{row['drafted_tokens_per_s']:.0f} against {row['plain_tokens_per_s']:.0f} tok/s, {row['speedup']:.2f} times plain. "
        f"Lossless: {load('lossless-cpu')['runs']} drafted runs of 20 prompts x 256 tokens, none differs from plain decoding."
    )
    yield ""
    yield (
        f"A verify pass takes {c['verify_1_ms']:.1f} / {c['verify_4_ms']:.1f} / {c['verify_8_ms']:.1f} / "
        f"{c['verify_16_ms']:.1f} ms at 1 / 4 / 8 / 16 rows (16 over 1: {c['rows_16_over_1']:.2f}; one row reads weights at "
        f"{c['weights_gb_per_s_at_1']:.0f} GB/s), a draft {c['draft_ms']:.1f} ms, an injection {c['inject_ms']:.2f} ms: a whole "
        f"block breaks even at tau {c['break_even_tau_at_16']:.2f}. Loading takes {found['load_s']:.1f} s, the kernels "
        f"{found['jit_s']:.0f} s from the disk cache (19 s to compile on a first run, measured at 6053bcc); peak memory {found['peak_rss_mib']} MiB with two sets of caches for 8,192 positions."
    )


PARTS = {  # of a round: how it is called, which floor it has
    "plain_round": ("plain round", "plain"), "verify_4": ("verify, 4 rows", "plain"),
    "verify_16": ("verify, 16 rows", "plain"), "draft": ("draft with head", "draft"),
    "round_16": ("whole round, block 16", "round"),
    "round_16_sampled_top_p": ("the same, temperature 0.7, top-p 0.9", "round"),
    "round_16_sampled_top_k": ("the same, top-k 50 too", "round"),
}  # fmt: skip


def at_2048(shape):
    return next(one for one in shape["contexts"] if one["context"] == 2048)


def gpu(card):
    round_, others = load(f"round-{card}"), load(f"round-others-{card}")
    embedded, attend = load(f"embedded-{card}"), load(f"attend-{CARDS[card]}")
    shape = round_["qwen3-8b"]
    prefill = shape["prefill"]
    at = at_2048(shape)
    yield f"### GPU: one {round_['card']}, bf16, copy {round_['copy_tb_per_s']:.2f} TB/s in the same run"
    yield ""
    yield (
        f"Qwen3-8B shape with random weights (`{round_['command']}`, {round_['commit']}), ms, and how much of it the floor is, "
        "the bytes over the copy:"
    )
    yield ""
    yield "| context | " + " | ".join(str(one["context"]) for one in shape["contexts"]) + " |"
    yield "|---|" + "---|" * len(shape["contexts"])
    for part, (name, floor) in PARTS.items():
        cells = [
            f"{one['ms'][part]:.2f} ({one['floor_ms'][floor] / one['ms'][part]:.0%})"
            for one in shape["contexts"]
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""
    yield (
        f"Injecting 16 rows into the drafter's caches takes {at['ms']['inject']:.2f} ms, a prompt of {prefill['tokens']} tokens "
        f"{prefill['ms']:.0f} ms; between two rounds of the loop the GPU waits {shape['host_gap_us']:.1f} us."
    )
    yield ""
    yield f"Other shapes at context 2048 (`{others['command']}`, {others['commit']}):"
    yield ""
    yield "| shape | plain round | verify, 16 rows | draft | whole round | floor of it | prompt of 2,048 |"
    yield "|---|---|---|---|---|---|---|"
    for name in ("qwen3-4b", "llama-3.1-8b", "smollm2-135m"):
        one = at_2048(others[name])
        ms, floor = one["ms"], one["floor_ms"]["round"]
        yield (
            f"| {name} | {ms['plain_round']:.2f} | {ms['verify_16']:.2f} | {ms['draft']:.2f} | {ms['round_16']:.2f} | "
            f"{floor:.2f} ({floor / ms['round_16']:.0%}) | {others[name]['prefill']['ms']:.0f} |"
        )
    yield ""
    optional = {
        "loops": loops, "timeline-qwen3-8b": timeline, "load": loading, "prefill-gemm": prompts,
        "peer": lambda found, _: peers(found, at["ms"], prefill),
    }  # fmt: skip
    for kind, lines in optional.items():  # not every card has run them
        name = f"{kind}-{card}"
        if (HERE / "results" / f"{name}.json").exists():
            yield from lines(load(name), name)
            yield ""
    yield from products(card)
    yield ""
    yield f"Attention, us a call in a chain as in a layer, the variant in use then (`{attend['command']}`, {attend['commit']}):"
    yield ""
    yield "| H/G/K | rows | " + " | ".join(str(c) for c in CONTEXTS) + " |"
    yield "|---|---|" + "---|" * len(CONTEXTS)
    times = {}
    for one in attend["results"]:
        times[tuple(one["heads"]), one["rows"], one["context"]] = one["variants_us"].get("the default")
    for heads, count in dict.fromkeys((heads, count) for heads, count, _ in times if count <= 16):
        cells = [times.get((heads, count, context)) for context in CONTEXTS]
        yield (
            f"| {'/'.join(map(str, heads))} | {count} | "
            + " | ".join(f"{c:.1f}" if c else "-" for c in cells)
            + " |"
        )
    yield ""
    yield f"Embedded pair (`{embedded['command']}`, {embedded['commit']}):"
    yield ""
    yield "| prompts | plain tok/s | drafted tok/s | over plain | tau |"
    yield "|---|---|---|---|---|"
    for row in embedded["rows"]:
        yield (
            f"| {row['kind']} ({row['prompts']}) | {row['plain_tokens_per_s']:.0f} | {row['drafted_tokens_per_s']:.0f} | "
            f"{row['speedup']:.2f} | {row['tau']:.2f} |"
        )
    same = load(f"lossless-embedded-{card}")
    yield ""
    yield (
        f"Lossless there: {same['runs']} drafted runs of {len(same['prompts'])} prompts, {same['tokens_compared']} tokens, "
        f"{same['differing']} differ from plain decoding ({same['commit']}); {shape['lossless']['tokens']} tokens of the Qwen3-8B "
        f"shape with every accepted length at blocks 4, 8 and 16: {is_same(shape['lossless'])} ({round_['commit']}). At a "
        "temperature, own drafter and replay: "
        + ", ".join(said_of(f"{name}-{card}", whose) for name, whose in SAMPLED.items())
        + "."
    )
    yield from sanitizer(card)


SAMPLED = {
    "lossless-sampled": "of the embedded pair", "lossless-sampled-golden-bf16": "of the golden pairs",
    "lossless-sampled-golden-f32": "of them in f32",
}  # fmt: skip


def is_same(found):
    return "all the same" if all(found[f"block_{b}"]["is_same"] for b in (4, 8, 16)) else "NOT the same"


def said_of(name, whose):
    found = load(name)
    return f"{found['runs']} runs {whose}, {found['tokens_compared']} tokens, {found['differing']} differ ({found['commit']})"


def loops(found, _):
    shapes = [name for name, one in found.items() if isinstance(one, dict) and "is_same" in one]
    ways = dict.fromkeys(way for name in shapes for way in found[name]["ms"])
    yield (
        f"Who starts the next round (`{found['command']}`, {found['commit']}): ms a round of 16 rows from context {found['context']}, "
        f"{found['rounds']} on end, each record read by the host; ids "
        f"{'the same' if all(found[name]['is_same'] for name in shapes) else 'NOT the same'}:"
    )
    yield ""
    yield "| shape | " + " | ".join(ways) + " |"
    yield "|---|" + "---|" * len(ways)
    for name in shapes:
        yield (
            f"| {name} | "
            + " | ".join(f"{found[name]['ms'].get(way, float('nan')):.3f}" for way in ways)
            + " |"
        )


def timeline(found, name):
    round_ = found["round_16"]
    yield (
        f"Where a round's {round_['us'] / 1e3:.2f} ms went at Qwen3-8B shape, context 2048 ({found['commit']}, kernels that note the GPU's clock; a picture of a few "
        f"layers is `bench/results/{name}.svg`):"
    )
    yield ""
    yield "| kernel | launches | us each | ms |"
    yield "|---|---|---|---|"
    for one in round_["kernels"]:
        yield f"| {one['kernel']} | {one['launches']} | {one['median_us']:.1f} | {one['adds_us'] / 1e3:.2f} |"


def products(card):
    found = load(f"kernels-{CARDS[card]}")
    yield (
        f"Products at few rows, us (`bench/kernels.py`, {found['commit']}, copy {found['copy_gb_s'] / 1e3:.2f} TB/s): bare, and with "
        "what is fused into them; cuBLAS has the product alone:"
    )
    yield ""
    yield "| product | N x K | MB | 1 row | 16 rows | bare | of copy | cuBLAS | over bare |"
    yield "|---|---|---|---|---|---|---|---|---|"
    rows = {}
    for one in found["results"]:
        if "outputs" in one:
            rows.setdefault((one["row"], one["outputs"], one["cols"]), {})[one["rows"]] = one
    for (row, outputs, cols), by in rows.items():
        one = by[16]
        yield (
            f"| {row} | {outputs} x {cols} | {one['bytes'] / 1e6:.0f} | {by[1]['us']:.1f} | {one['us']:.1f} | {one['bare_us']:.1f} | "
            f"{one['bytes'] / one['bare_us'] / 1e3 / found['copy_gb_s']:.0%} | {one['cublas_us']:.1f} | "
            f"{one['cublas_us'] / one['bare_us']:.2f} |"
        )


def loading(found, name):
    best = max(found["loads"], key=lambda one: one["gb_per_s"])
    seconds = found["gb"] / best["gb_per_s"]
    yield (
        f"Loading {found['gb']:.1f} GB of safetensors from the page cache to packed device memory takes {seconds:.2f} s: "
        f"{best['gb_per_s']:.1f} GB/s, {best['of_pinned']:.0%} of the {found['pinned_gb_per_s']:.1f} GB/s from pinned memory in the "
        f"same run (`bench/results/{name}.json`: `{found['command']}`, {found['commit']}: {best['threads']} threads, {best['piece_mb']} MB a piece)."
    )


def prompts(found, _):
    """The products of a prompt."""
    rows = max(one["rows"] for one in found["results"])
    said = [
        f"{one['outputs']} x {one['cols']} {one['us']:.0f} us ({one['tflop_s']:.0f} TFLOP/s, {one['cublas_us'] / one['us']:.2f} of cuBLAS)"
        for one in found["results"]
        if one["rows"] == rows
    ]
    yield f"Products of a prompt, {rows} rows (`{found['command']}`, {found['commit']}): {'; '.join(said)}."


def peers(found, ms, prefill):
    versions = found["versions"]
    step, token = found["dflash_step_ms"]["median"], found["transformers_token_ms"]["median"]
    yield (
        f"In another run on such a card, weights of the same shape, context {found['context']} (`bench/peer.py`, {found['commit']}): a step of the "
        f"public dflash {found['dflash']} loop takes {step:.1f} ms, {step / ms['round_16']:.1f} times our round; a token of "
        f"transformers' own generate {token:.1f} ms, {token / ms['plain_round']:.1f} times our plain round; the prompt's pass "
        f"{found['dflash_prefill_ms']['median']:.0f} ms, ours {prefill['ms']:.0f} ms (torch {versions['torch']}, transformers "
        f"{versions['transformers']})."
    )


def sanitizer(card):
    found = load(f"sanitizer-{card}")
    said = []
    for name, one in found["checks"].items():
        dirty = [part for part, how in one["parts"].items() if not how["is_clean"]]
        said.append(
            f"{name} {'clean' if one['is_clean'] else 'NOT clean in ' + ', '.join(dirty)} ({one['passed']} tests)"
        )
    yield ""
    yield (
        f"compute-sanitizer ({found['compute_sanitizer'].strip()}) over the kernel tests' small shapes (`{found['command']}`, "
        f"{found['commit']}): {'; '.join(said)}. Each check found the mistake planted for it."
        if all(one["parts"]["planted"]["is_clean"] for one in found["checks"].values())
        else f"compute-sanitizer did not find a mistake planted for it: see bench/results/sanitizer-{card}.json."
    )


CONTEXTS = (128, 512, 2048, 8192, 32768)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    text = "\n".join([*cpu(), *(line for card in CARDS for line in ("", *gpu(card)))])
    if not parser.parse_args().write:
        print(text)
        return
    readme = README.read_text()
    before, rest = readme.split(MARK)
    README.write_text(f"{before}{MARK}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
