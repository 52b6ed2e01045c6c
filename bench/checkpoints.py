"""weights/CHECKPOINTS.md: every published DFlash pair, and what minidflash does with it.

Made of weights/checkpoints.toml, which says what it holds. Prints it; --write writes it, and --check exits
with 1 where the file says something else.
"""

import argparse
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FACTS, PAGE = ROOT / "weights" / "checkpoints.toml", ROOT / "weights" / "CHECKPOINTS.md"
HEAD = """# Published DFlash pairs

Made of [checkpoints.toml](checkpoints.toml) by `python bench/checkpoints.py --write`. The facts are what the
pages of the checkpoints state; tests resolve them. What no page states is "file" here: it is read from the
file, and where the file does not say it either, refused. Two revisions of one repository can differ in all of
it, so pin one (`--revision`, `--drafter-revision`). Drafts are z-lab's where no owner stands before them.

*Runs*: the target's family and the drafter's form are tested against reference outputs, in the cases named.
The published weights were not at hand: `minidflash info --target T --drafter D` tells of the files what this
page cannot. Listings of their headers were, of Llama-3.1-8B-Instruct, Qwen3-8B, Qwen3-8B-FP8,
Qwen3-Coder-30B-A3B, Qwen3-30B-A3B-FP8, gpt-oss-20b, gemma-4-31B and the drafter Qwen3-8B-DFlash-b16: a test
reads every name, shape and dtype in them (tests/published_tensors.py).
"""
COLUMNS = [
    "draft", "minidflash", "layers, width, ffn", "heads", "sees", "block", "taps (of layers)", "mask id",
    "rope", "parameters",
]  # fmt: skip
# What a drafter's config needs.
STATED = ["layers", "width", "ffn", "heads", "block", "taps", "mask_id", "theta"]


@dataclass(frozen=True)
class Published:
    """A draft of the file. family, form: the tables of their names. The others: as the file says; None: not
    stated."""

    draft: str
    family: dict
    form: dict
    is_copy: bool = False
    layers: int | None = None
    width: int | None = None
    ffn: int | None = None
    heads: list | None = None
    windows: list = field(default_factory=list)
    is_causal: bool | None = None
    bias: bool = False
    block: int | None = None
    taps: list | None = None
    target_layers: int | None = None
    mask_id: int | None = None
    theta: float | None = None
    yarn: dict | None = None
    max_positions: int | None = None
    vocab: int | None = None
    parameters: float | None = None  # millions

    @property
    def refusals(self):
        """Why it is refused, in words."""
        return [part["why"] for part in (self.family, self.form) if not part["runs"] and part["why"]]

    @property
    def runs(self):
        """Whether family and form are both tested; where its form is not stated, its file decides."""
        return self.family["runs"] and self.form["runs"]

    @property
    def missing(self):
        """What its page leaves out of STATED."""
        return [name for name in STATED if getattr(self, name) is None]

    def config(self, form=True):
        """The drafter's config.json that these facts make; what is not stated is left out.

        form: with the keys of its form.
        """
        heads, groups, size = self.heads or (None,) * 3
        windows = self.windows or [0] * (self.layers or 0)
        keys, nested = ((self.form.get(name, {}) if form else {}) for name in ("keys", "nested"))
        config = {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": self.layers,
            "hidden_size": self.width, "num_attention_heads": heads, "num_key_value_heads": groups,
            "head_dim": size, "intermediate_size": self.ffn, "block_size": self.block, "rms_norm_eps": 1e-6,
            "num_target_layers": self.target_layers, "hidden_act": "silu", "torch_dtype": "bfloat16",
            "layer_types": [f"{'sliding' if window else 'full'}_attention" for window in windows],
            "sliding_window": max(windows, default=0) or None, "is_causal": self.is_causal,
            "attention_bias": self.bias, "rope_theta": self.theta,
            "rope_scaling": self.yarn and {"rope_type": "yarn", **self.yarn},
            "max_position_embeddings": self.max_positions, "vocab_size": self.vocab,
            "dflash_config": {"mask_token_id": self.mask_id, "target_layer_ids": self.taps, **nested},
        }  # fmt: skip
        return {key: value for key, value in config.items() if value is not None} | keys


def facts():
    """The file as it is."""
    return tomllib.loads(FACTS.read_text(encoding="utf-8"))


def read():
    """All pairs, in the file's order. Errors: KeyError for a family or form that it does not have, TypeError
    for an unknown key."""
    found = facts()
    parts = {name: found[name] for name in ("family", "form")}
    return [
        Published(**{key: parts[key][value] if key in parts else value for key, value in entry.items()})
        for entry in found["pair"]
    ]


def row(one):
    """A line of the table."""

    def told(value):
        return "file" if value is None else str(value)

    if one.runs:
        status = f"**runs** (`{one.family['golden']}`, `{one.form['golden']}`)"
    else:
        status = "refused: " + "; ".join(one.refusals) if one.refusals else "its file decides"
    sees = ", ".join(
        f"{window or 'all'} x {one.windows.count(window)}" for window in dict.fromkeys(one.windows)
    )
    taps = "file" if one.taps is None else ", ".join(map(str, one.taps)) + f" ({told(one.target_layers)})"
    rope = told(one.theta and f"{one.theta:,.0f}")
    if one.yarn:
        rope += f", yarn {one.yarn['factor']:.0f}"
    count = "file" if one.parameters is None else f"{one.parameters:.0f} M"
    cells = [
        one.draft + " (copy)" * one.is_copy, status, ", ".join(map(told, (one.layers, one.width, one.ffn))),
        "file" if one.heads is None else "/".join(map(str, one.heads)) + ", biases" * one.bias,
        sees or ("all" if one.layers else "file"), told(one.block), taps, told(one.mask_id), rope, count,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def page(pairs):
    """The whole text."""
    runs = sum(one.runs for one in pairs)
    head = f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"
    lines = [HEAD, f"{runs} of {len(pairs)} run.", "", *head]
    lines += [*map(row, pairs), "", "heads: query/key/value/size. (copy): known from a copy of its config."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write weights/CHECKPOINTS.md")
    parser.add_argument("--check", action="store_true", help="exit 1 unless it is what would be written")
    args = parser.parse_args()
    text = page(read())
    if args.write:
        PAGE.write_text(text, encoding="utf-8")
    elif not args.check:
        print(text, end="")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        print("weights/CHECKPOINTS.md is stale: python bench/checkpoints.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
