"""Experts as the files of a family hold them: a table of names.py for each layout of stack.Experts.

A layout is a function of the stack, the layer and what stands before its tensors' names.
"""

from minidflash.kernels.weight import EXPERT_PAIRS, EXPERTS, VECTOR
from minidflash.weights.names import Named, matrix, vector


def separate(stack, layer, at):
    """A tensor for each expert's gate, up and down: models.md 3."""
    count, width, inner = layer.experts.count, stack.width, layer.ffn_width
    names = [[f"{at}experts.{e}.{part}_proj.weight" for part in ("gate", "up", "down")] for e in range(count)]
    pairs = tuple((name, (inner, width)) for gate, up, _ in names for name in (gate, up))
    return {
        "router": matrix(at + "gate.weight", rows=count, cols=width),
        "experts_up": Named(EXPERT_PAIRS, (count, 2 * inner, width), pairs),
        "experts_down": Named(
            EXPERTS, (count, width, inner), tuple((down, (width, inner)) for *_, down in names)
        ),
    }


def fused(stack, layer, at):
    """All experts in one tensor, transposed, gate and up interleaved, with biases: models.md 4."""
    count, width, inner = layer.experts.count, stack.width, layer.ffn_width
    up, down = at + "experts.gate_up_proj", at + "experts.down_proj"
    return biased(stack, layer, at) | {
        "experts_up": Named(
            EXPERT_PAIRS,
            (count, 2 * inner, width),
            ((up, (count, width, 2 * inner)),),
            "transpose, de-interleave",
        ),
        "experts_down": Named(EXPERTS, (count, width, inner), ((down, (count, inner, width)),), "transpose"),
    }


def mxfp4(stack, layer, at):
    """Blocks of 32 inputs and their scales, rows interleaved: models.md 4."""

    def named(role, name, rows, cols, transform):
        found = (
            ("_blocks", (layer.experts.count, rows, cols // 32, 16)),
            ("_scales", (layer.experts.count, rows, cols // 32)),
        )
        sources = tuple((f"{at}experts.{name}_proj{ending}", shape) for ending, shape in found)
        return Named(role, (layer.experts.count, rows, cols), sources, "blocks and scales" + transform)

    width, inner = stack.width, layer.ffn_width
    return biased(stack, layer, at) | {
        "experts_up": named(EXPERT_PAIRS, "gate_up", 2 * inner, width, ", de-interleave"),
        "experts_down": named(EXPERTS, "down", width, inner, ""),
    }


def stacked(stack, layer, at):
    """All experts in one tensor, gate rows before up rows, and a router with norm and scales: models.md 5."""
    count, width, inner = layer.experts.count, stack.width, layer.ffn_width
    up, down, router = at + "experts.gate_up_proj", at + "experts.down_proj", at + "router."
    shapes = (count, 2 * inner, width), (count, width, inner)
    return {
        "router": matrix(router + "proj.weight", rows=count, cols=width),
        "router_norm": Named(VECTOR, (width,), ((router + "scale", (width,)),), "over root"),
        "expert_scale": vector(router + "per_expert_scale", size=count),
        "experts_up": Named(EXPERT_PAIRS, shapes[0], ((up, shapes[0]),), "each"),
        "experts_down": Named(EXPERTS, shapes[1], ((down, shapes[1]),), "each"),
    }


def biased(stack, layer, at):
    """gpt-oss's router, and its biases, the same in both layouts."""
    count, width, inner = layer.experts.count, stack.width, layer.ffn_width
    up, down = (at + f"experts.{name}_proj_bias" for name in ("gate_up", "down"))
    return {
        "router": matrix(at + "router.weight", rows=count, cols=width),
        "router_bias": vector(at + "router.bias", size=count),
        "up_bias": Named(VECTOR, (count, 2 * inner), ((up, (count, 2 * inner)),), "de-interleave"),
        "down_bias": Named(VECTOR, (count, width), ((down, (count, width)),)),
    }


LAYOUTS = {"separate": separate, "fused": fused, "mxfp4": mxfp4, "stacked": stacked}
