"""What a step must read at least: bytes of a plain step, a verify pass, a draft and a round, and when
drafting pays.

Counted from what is bound, before a weight is read. A row goes through few of a mixture's experts, several
rows through more: as many as independent rows would touch is expected, what a run's rows did touch its rounds
tell.
"""

from dataclasses import dataclass
from math import prod

from minidflash.kernels.roofline import PEAKS
from minidflash.kernels.weight import EXPERT_PAIRS, EXPERTS, TABLE, VECTOR
from minidflash.weights.names import IDS, MARKS

WIDTHS = 4, 8, 16  # rows of verify passes


@dataclass(frozen=True)
class Step:
    """What is read once. rows: of the pass; experts: distinct ones a layer, None where there are none."""

    name: str
    rows: int
    experts: float | None
    bytes: int

    def ms(self, card):
        """Milliseconds at least, at the maker's bandwidth of a card of roofline.PEAKS."""
        return 1e3 * self.bytes / PEAKS[card][0]


def expected_experts(layer, rows):
    """Distinct experts that `rows` independent rows go through; None for a layer without."""
    if layer.experts is None:
        return None
    return layer.experts.count * (1 - (1 - layer.experts.used / layer.experts.count) ** rows)


def parameters(bound):
    """How many numbers the weights of a checkpoint are; scales of blocks and ids are none of them."""
    return sum(prod(one.shape) for one in bound.values() if one.role not in (IDS, MARKS))


def weight_parts(pair):
    """Part -> bytes of its weights: tables (embedding, head), layers, experts, drafter."""
    found = dict.fromkeys(("tables", "layers", "experts", "drafter"), 0)
    for name, bound in pair.target.bound.items():
        is_table = name in ("embed", "head")
        part = "experts" if bound.role in (EXPERTS, EXPERT_PAIRS) else "tables" if is_table else "layers"
        found[part] += bound.nbytes
    found["drafter"] = sum(bound.nbytes for bound in pair.drafter.bound.values()) if pair.drafter else 0
    return {part: size for part, size in found.items() if size}


def steps(pair, keys, item):
    """[Step]: plain, and with a drafter the draft, and verify pass and round of each width up to its block.

    keys: of the context, that attention reads. item: bytes of a number in the caches.
    """
    target, drafter = pair.target, pair.drafter
    head = target.bound.get("head", target.bound["embed"]).nbytes
    found = [_verify("plain", target, 1, head, keys, item)]
    if drafter is None:
        return found
    own = sum(one.nbytes for one in drafter.bound.values() if one.role not in (VECTOR, TABLE, IDS, MARKS))
    borrowed = 0 if "head" in drafter.bound else head
    draft = Step("draft", drafter.config.block, None, own + borrowed + key_bytes(drafter.config, keys, item))
    found.append(draft)
    for width in dict.fromkeys(min(width, drafter.config.block) for width in WIDTHS):
        verify = _verify(f"verify {width}", target, width, head, keys, item)
        found += [verify, Step(f"round {width}", width, verify.experts, verify.bytes + draft.bytes)]
    return found


def break_even(found):
    """Width -> tokens a round from which drafting pays, where bytes are all that counts."""
    plain = found[0].bytes
    return {step.rows: step.bytes / plain for step in found if step.name.startswith("round")}


def _verify(name, target, rows, head, keys, item):
    total, touched = head + key_bytes(target.config, keys, item), []
    for where, bound in target.bound.items():
        if bound.role in (VECTOR, TABLE) or where == "head":
            continue
        share = 1.0
        if bound.role in (EXPERTS, EXPERT_PAIRS):
            layer = target.config.layers[int(where.split(".")[1])]
            touched.append(expected_experts(layer, rows))
            share = touched[-1] / layer.experts.count
        total += share * bound.nbytes
    return Step(name, rows, sum(touched) / len(touched) if touched else None, round(total))


def key_bytes(stack, keys, item):
    """Bytes of the keys and values that one row sees; the rows of a block see nearly the same."""
    return sum(min(layer.window or keys, keys) * layer.kv_width * item for layer in stack.layers)
