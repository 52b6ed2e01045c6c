"""What two sides of a comparison say of one stage: errors, the first index that is off, both values."""

from dataclasses import asdict, dataclass, replace

import numpy as np

from ..errors import UserError

# Stage -> where it shows. The kernels are fused, so norm and rope have no array of their own: a norm gives
# all v of a row one factor, and a rotation keeps the lengths of pairs and turns them.
STAGES = {
    "calls": "the order of kernels",
    "rows": "ids and positions of a pass",
    "embed": "the stream at its start",
    "norm": "the one factor of a row's v",
    "qkv": "v, lengths of the pairs of q and k",
    "rope": "angles of the pairs of q and k",
    "attention": "heads, stream behind o",
    "mlp": "act(gate) up, stream behind down",
    "route": "experts, shares, normed rows",
    "experts": "inside, stream behind them",
    "taps": "the streams of their layers",
    "fuse": "features behind fc and norm",
    "inject": "positions, v, lengths of k's pairs",
    "draft logits": "logits, drafts",
    "logits": "the target's logits, its choices",
    "accept": "tokens, start, anchor",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where in a run: model ("target", "drafter"), layer or None, round (0: the prompt), and whose word the
    other side is ("oracle", "config.json", a reference file)."""

    model: str = ""
    layer: int | None = None
    round: int = 0
    by: str = "oracle"

    def __str__(self):
        layer = "" if self.layer is None else f" layer {self.layer}"
        when = "prompt" if self.round == 0 else f"round {self.round}"
        return ", ".join(filter(None, [f"{self.model}{layer}", when]))


@dataclass(frozen=True)
class Finding:
    """One array of one stage. error: largest, absolute. ulps: largest, in units of the last place of what
    was expected. share: largest error over its tolerance, above 1: it is off. index, found, expected: of the
    first element that is off, else of the one nearest to it; NaN where a side has no such element."""

    stage: str
    place: Place
    what: str
    error: float
    ulps: float
    share: float
    index: str
    found: float
    expected: float

    @property
    def is_off(self):
        return not self.share <= 1

    def told(self):
        """Stage, place, index and both values on one line."""
        if self.stage == "calls":
            return f"calls: {self.place}, {self.what}"
        return (f"{self.stage}: {self.place}, {self.what} {self.index} is {self.found:.9g}, "
                f"{self.place.by} has {self.expected:.9g}")  # fmt: skip

    def to_json(self):
        """A dict for strict JSON: what is not finite is null."""
        flat = asdict(self.place) | {k: v for k, v in asdict(self).items() if k != "place"}
        return {
            key: None if isinstance(value, float) and not np.isfinite(value) else value
            for key, value in flat.items()
        } | {"is_off": self.is_off}


def compare(stage, place, what, found, expected, tolerance, axes=(), first=None, is_bf16=False):
    """Finding of two arrays of one shape, None where they are empty.

    found, expected: float64 or integers. tolerance: absolute, broadcast to them. axes: names of the axes; the
    last dims without one share "element". first: what the first axis counts (positions), default 0, 1, ...
    is_bf16: type that ulps are of, default f32. Of lists of unequal length the longer one's end is off.
    Errors: UserError for arrays of other shapes.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape and found.ndim == 1:
        most = max(len(found), len(expected))
        found, expected = (np.pad(z, (0, most - len(z)), constant_values=np.nan) for z in (found, expected))
    if found.shape != expected.shape:
        raise UserError(f"{what} is of shape {found.shape}, {place.by} has {expected.shape}: another model",
                        "compare a run with numbers of its own model")  # fmt: skip
    if not found.size:
        return None
    unit = np.spacing(np.maximum(np.abs(expected), np.finfo(np.float32).tiny).astype(np.float32))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(found == expected, 0.0, np.abs(found - expected))
        share = np.where(error == 0, 0.0, error / np.broadcast_to(tolerance, error.shape))
    error, share = (np.where(np.isnan(a), np.inf, a) for a in (error, share))
    off = np.argwhere(share > 1)
    at = tuple(map(int, off[0] if len(off) else np.unravel_index(np.argmax(share), share.shape)))
    names = [*axes, *["element"] * (len(at) - len(axes))]
    counts = (at[0] if first is None or at[0] >= len(first) else first[at[0]], *at[1:])
    index = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
    ulps = float((error / (unit * (2.0**16 if is_bf16 else 1))).max())
    return Finding(
        stage, place, what, float(error.max()), ulps, float(share.max()), index, float(found[at]),
        float(expected[at]),
    )  # fmt: skip


def by_stage(findings):
    """The worst Finding of every stage that has one, in the order of STAGES; error and ulps are the largest
    of any."""
    worst = {}
    for stage in STAGES:
        mine = [one for one in findings if one.stage == stage]
        if mine:
            top = next((one for one in mine if one.is_off), max(mine, key=lambda one: one.share))
            most = {name: max(getattr(one, name) for one in mine) for name in ("error", "ulps")}
            worst[stage] = replace(top, **most)
    return worst


def table(findings):
    """Lines for a terminal, a stage each: its largest errors, then the first element that is off, or the one
    nearest to it."""
    yield f"{'':8}{'stage':<13}{'seen in':<36}{'error':>9}{'ulp':>9}{'of tolerance':>13}  at"
    for stage, one in by_stage(findings).items():
        numbers = f"{one.error:>9.2g}{one.ulps:>9.2g}{one.share:>13.2g}"
        at = f"{one.place}: {one.what} {one.index}".rstrip()
        yield f"{'FAILED' if one.is_off else 'ok':<8}{stage:<13}{STAGES[stage]:<36}{numbers}  {at}"
