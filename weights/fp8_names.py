"""Which tensors of an FP8 checkpoint are FP8, and what their scales are called: models.md 11."""

from dataclasses import replace

from minidflash.kernels.fp8 import BLOCK, SCALE_ROWS, scale_shape
from minidflash.kernels.weight import EXPERT_PAIRS, EXPERTS, MATRIX, PAIRS

from minidflash.errors import UserError

FP8, CODES = "fp8", ("F8_E4M3",)
WEIGHT, SCALE = ".weight", ".weight_scale_inv"
SCALE_DTYPES = "BF16", "F32", "F16"
LINEAR = MATRIX, PAIRS, EXPERTS, EXPERT_PAIRS  # roles
KEPT = "head", "router"  # weights of these, by our names, that are never FP8
INPUT_SCALES = ".input_scale", ".activation_scale"


def with_fp8(table, fp8):
    """The table {our name: Named} of a checkpoint whose linear modules are FP8 but those that `fp8` skips.

    fp8: None: as it is. Errors: UserError naming tensors that are one weight here and cannot be.
    """
    if fp8 is None:
        return table
    return {ours: _quantised(ours, named, fp8) for ours, named in table.items()}


def _quantised(ours, named, fp8):
    if named.role not in LINEAR or ours.rpartition(".")[2] in KEPT or named.transform != "stack":
        return named
    skips = {fp8.skips(name.removesuffix(WEIGHT)): name for name, _ in named.sources}
    if len(skips) > 1:
        what = f"quantization_config leaves {skips[True]} as it is, and not {skips[False]}"
        raise UserError(f"{what}: they are one weight here, {ours}")
    if True in skips:
        return named
    for name, (rows, _) in named.sources if len(named.sources) > 1 else ():
        if rows % SCALE_ROWS:
            what = f"tensor {name} has {rows} rows: FP8 tensors are joined, as {ours}"
            raise UserError(f"{what}, in groups of {SCALE_ROWS} rows")
    scales = tuple((scale_of(name), scale_shape(*shape, BLOCK)) for name, shape in named.sources)
    return replace(named, sources=named.sources + scales, transform=FP8)


def scale_of(name):
    """What a checkpoint calls the scales of a tensor."""
    return name.removesuffix(WEIGHT) + SCALE


def hint_of(name):
    """What to know of a tensor that has no place, where it comes from another way to quantise; else None."""
    if name.endswith(INPUT_SCALES):
        return "static scales of activations are not built: take a checkpoint with activation_scheme dynamic"
    if name.endswith((SCALE, "_scale", ".weight_packed", ".weight_shape", ".weight_zero_point")):
        return "built: FP8 in blocks of 128 x 128, in modules that quantization_config does not leave out"
    return None
