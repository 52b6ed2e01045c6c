"""The measured tables of the README, from bench/results: python bench/report.py [--write]

With --write they replace what stands between the README's two marks.
"""

import argparse
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
MARK, END = "<!-- measured: bench/report.py -->", "<!-- end of measured -->"


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


def gpu():
    round_, gemm = load("lossless-qwen3-8b-h100"), load("gemm-nvidia-h100-80gb-hbm3")
    embedded, attend = load("embedded-h100"), load("attend-nvidia-h100-80gb-hbm3")
    shape = round_["qwen3-8b"]
    at = shape["contexts"][0]
    ms, floor = at["ms"], at["floor_ms"]
    yield f"### GPU: one {round_['card']}, bf16, copy {round_['copy_tb_per_s']:.2f} TB/s in the same run"
    yield ""
    yield (
        f"Qwen3-8B shape with random weights at context {at['context']} (`{round_['command']}`, {round_['commit']}; floors are "
        "bytes over the copy):"
    )
    yield ""
    yield "| part | ms | floor ms | of floor |"
    yield "|---|---|---|---|"
    for name, time, least in (
        ("plain round", ms["plain_round"], floor["plain"]),
        ("verify, 16 rows", ms["verify_16"], floor["plain"]),
        ("draft with head", ms["draft"], floor["draft"]),
        ("whole round, block 16", ms["round_16"], floor["round"]),
    ):
        yield f"| {name} | {time:.2f} | {least:.2f} | {least / time:.0%} |"
    yield f"| prefill, {shape['prefill']['tokens']} tokens | {shape['prefill']['ms']:.0f} | | |"
    yield ""
    yield from loading()
    yield ""
    yield from peers(ms, shape["prefill"])
    yield ""
    yield f"Skinny products, dependent launch, us (`{gemm['command']}`, {gemm['commit']}):"
    yield ""
    yield "| N x K | MB | 1 row | 16 rows | of copy | cuBLAS, 16 rows | cuBLAS / ours |"
    yield "|---|---|---|---|---|---|---|"
    rows = {}
    for one in gemm["results"]:
        rows.setdefault((one["outputs"], one["cols"]), {})[one["rows"]] = one
    for (outputs, cols), by in rows.items():
        one, many = by[1]["dependent_us"], by[16]["dependent_us"]
        size = 2e-6 * outputs * cols
        yield (
            f"| {outputs} x {cols} | {size:.1f} | {one:.1f} | {many:.1f} | {1e3 * size / many / gemm['copy_gb_s']:.0%} | "
            f"{by[16]['cublas_us']:.1f} | {by[16]['cublas_us'] / many:.2f} |"
        )
    yield ""
    yield f"Attention, us a call in a chain as in a layer, the variant in use (`{attend['command']}`, {attend['commit']}):"
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
    yield f"Embedded pair, `minidflash bench --backend cuda`, {embedded['max_tokens']} tokens at most:"
    yield ""
    yield "| prompts | plain tok/s | drafted tok/s | over plain | tau |"
    yield "|---|---|---|---|---|"
    for row in embedded["rows"]:
        yield (
            f"| {row['kind']} ({row['prompts']}) | {row['plain_tokens_per_s']:.0f} | {row['drafted_tokens_per_s']:.0f} | "
            f"{row['speedup']:.2f} | {row['tau']:.2f} |"
        )
    same = load("lossless-embedded-h100")
    yield ""
    yield (
        f"Lossless there: {same['runs']} drafted runs of {len(same['prompts'])} prompts, {same['tokens_compared']} tokens, "
        f"{same['differing']} differ from plain decoding; {shape['lossless']['tokens']} tokens of the Qwen3-8B shape with every "
        "accepted length at blocks 4, 8 and 16: all the same."
    )


def loading():
    found = load("load-h100")
    best = max(found["loads"], key=lambda one: one["gb_per_s"])
    seconds = found["gb"] / best["gb_per_s"]
    yield (
        f"Loading {found['gb']:.1f} GB of safetensors from the page cache to packed device memory takes {seconds:.2f} s: "
        f"{best['gb_per_s']:.1f} GB/s, {best['of_pinned']:.0%} of the {found['pinned_gb_per_s']:.1f} GB/s from pinned memory in the "
        f"same run (`{found['command']}`, {found['commit']}: {best['threads']} threads, {best['piece_mb']} MB a piece)."
    )


def peers(ms, prefill):
    found = load("peer-h100")
    versions = found["versions"]
    step, token = found["dflash_step_ms"]["median"], found["transformers_token_ms"]["median"]
    yield (
        f"In another run on such a card, weights of the same shape, context {found['context']} (`bench/peer.py`, {found['commit']}): a step of the "
        f"public dflash {found['dflash']} loop takes {step:.1f} ms, {step / ms['round_16']:.1f} times our round; a token of "
        f"transformers' own generate {token:.1f} ms, {token / ms['plain_round']:.1f} times our plain round; the prompt's pass "
        f"{found['dflash_prefill_ms']['median']:.0f} ms, ours {prefill['ms']:.0f} ms (torch {versions['torch']}, transformers "
        f"{versions['transformers']})."
    )


def sanitizer():
    found = load("sanitizer-h100")
    if "checks" not in found:
        return
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
        else "compute-sanitizer did not find a mistake planted for it: see bench/results/sanitizer-h100.json."
    )


CONTEXTS = (128, 512, 2048, 8192, 32768)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    text = "\n".join([*cpu(), "", *gpu(), *sanitizer()])
    if not parser.parse_args().write:
        print(text)
        return
    readme = README.read_text()
    before, rest = readme.split(MARK)
    README.write_text(f"{before}{MARK}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
