"""FP8 twins of golden checkpoints, quantised with ml_dtypes, and the same numbers dequantised in an f32
checkpoint."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.golden_files import golden

BLOCK = 128
QUANTIZATION = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
KEPT = "embed_tokens", "lm_head", "mlp.gate.weight"  # and vectors


def quantised(weight, scale_dtype=np.float32):
    """(codes, scales, the dequantised f32 numbers) of a matrix."""
    weight = np.asarray(weight, np.float32)
    codes, wide = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(weight)
    scales = np.zeros([-(-size // BLOCK) for size in weight.shape], scale_dtype)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        scales[i, j] = np.abs(weight[block]).max() / 400  # less than 448, as scales are rounded
        scale = np.float32(scales[i, j])
        codes[block] = (weight[block] / scale).astype(ml_dtypes.float8_e4m3fn)
        wide[block] = codes[block].astype(np.float32) * scale
    return codes, scales, wide


def write_twins(folder, name, scale_dtype=np.float32, kept=KEPT, **quantization):
    """(FP8 checkpoint, f32 checkpoint) of a golden case.

    kept: parts of names of matrices that stay as they are. quantization: keys of quantization_config that
    are added, or None: left out.
    """
    own, wide = {}, {}
    for path in sorted(golden(name).glob("model*.safetensors")):
        for key, value in load_file(path).items():
            own[key] = wide[key] = value
            if value.ndim == 2 and not any(part in key for part in kept):
                scale = key.removesuffix("weight") + "weight_scale_inv"
                own[key], own[scale], wide[key] = quantised(value, scale_dtype)
    config = json.loads((golden(name) / "config.json").read_text())
    stated = {key: value for key, value in (QUANTIZATION | quantization).items() if value is not None}
    for place, tensors, more in (("fp8", own, {"quantization_config": stated}), ("f32", wide, {})):
        (folder / place).mkdir(parents=True)
        save_file(tensors, folder / place / "model.safetensors")
        (folder / place / "config.json").write_text(json.dumps(config | more))
    return folder / "fp8", folder / "f32"
