"""Headers of published checkpoints: every tensor's name, shape and dtype as the files list them.

Read from public listings of the files' own headers, which also give how many tensors and numbers there are.
"""

import itertools
import json
import math
from dataclasses import dataclass

from tests.published import CODER, CODER_FP8, GEMMA_31B, LLAMA_8B, PAIRS, QWEN3_8B, gpt_oss

KINDS = {"BF16": 2, "F8_E4M3": 1, "U8": 1}  # bytes each
ATTENTION = """
model.layers.{layer}.self_attn.k_proj.weight 1024 4096
model.layers.{layer}.self_attn.o_proj.weight 4096 4096
model.layers.{layer}.self_attn.q_proj.weight 4096 4096
model.layers.{layer}.self_attn.v_proj.weight 1024 4096
"""
NORMS = """
model.layers.{layer}.input_layernorm.weight 4096
model.layers.{layer}.post_attention_layernorm.weight 4096
model.norm.weight 4096
"""
QK_NORMS = """
model.layers.{layer}.self_attn.k_norm.weight 128
model.layers.{layer}.self_attn.q_norm.weight 128
"""
LLAMA = f"""
lm_head.weight 128256 4096
model.embed_tokens.weight 128256 4096
{NORMS}{ATTENTION}
model.layers.{{layer}}.mlp.down_proj.weight 4096 14336
model.layers.{{layer}}.mlp.gate_proj.weight 14336 4096
model.layers.{{layer}}.mlp.up_proj.weight 14336 4096
"""
QWEN3_LINEAR = f"""{ATTENTION}
model.layers.{{layer}}.mlp.down_proj.weight 4096 12288
model.layers.{{layer}}.mlp.gate_proj.weight 12288 4096
model.layers.{{layer}}.mlp.up_proj.weight 12288 4096
"""
QWEN3_REST = f"""
lm_head.weight 151936 4096
model.embed_tokens.weight 151936 4096
{NORMS}{QK_NORMS}
"""
MOE_LINEAR = """
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight 2048 768
model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight 768 2048
model.layers.{layer}.mlp.experts.{expert}.up_proj.weight 768 2048
model.layers.{layer}.self_attn.k_proj.weight 512 2048
model.layers.{layer}.self_attn.o_proj.weight 2048 4096
model.layers.{layer}.self_attn.q_proj.weight 4096 2048
model.layers.{layer}.self_attn.v_proj.weight 512 2048
"""
MOE_REST = f"""
lm_head.weight 151936 2048
model.embed_tokens.weight 151936 2048
model.layers.{{layer}}.input_layernorm.weight 2048
model.layers.{{layer}}.mlp.gate.weight 128 2048
model.layers.{{layer}}.post_attention_layernorm.weight 2048
model.norm.weight 2048
{QK_NORMS}
"""
DRAFTER = """
fc.weight 4096 20480
hidden_norm.weight 4096
layers.{layer}.input_layernorm.weight 4096
layers.{layer}.mlp.down_proj.weight 4096 12288
layers.{layer}.mlp.gate_proj.weight 12288 4096
layers.{layer}.mlp.up_proj.weight 12288 4096
layers.{layer}.post_attention_layernorm.weight 4096
layers.{layer}.self_attn.k_norm.weight 128
layers.{layer}.self_attn.k_proj.weight 1024 4096
layers.{layer}.self_attn.o_proj.weight 4096 4096
layers.{layer}.self_attn.q_norm.weight 128
layers.{layer}.self_attn.q_proj.weight 4096 4096
layers.{layer}.self_attn.v_proj.weight 1024 4096
norm.weight 4096
"""
GPT_OSS = """
lm_head.weight 201088 2880
model.embed_tokens.weight 201088 2880
model.layers.{layer}.input_layernorm.weight 2880
model.layers.{layer}.mlp.experts.down_proj_bias 32 2880
model.layers.{layer}.mlp.experts.down_proj_blocks 32 2880 90 16 U8
model.layers.{layer}.mlp.experts.down_proj_scales 32 2880 90 U8
model.layers.{layer}.mlp.experts.gate_up_proj_bias 32 5760
model.layers.{layer}.mlp.experts.gate_up_proj_blocks 32 5760 90 16 U8
model.layers.{layer}.mlp.experts.gate_up_proj_scales 32 5760 90 U8
model.layers.{layer}.mlp.router.bias 32
model.layers.{layer}.mlp.router.weight 32 2880
model.layers.{layer}.post_attention_layernorm.weight 2880
model.layers.{layer}.self_attn.k_proj.bias 512
model.layers.{layer}.self_attn.k_proj.weight 512 2880
model.layers.{layer}.self_attn.o_proj.bias 2880
model.layers.{layer}.self_attn.o_proj.weight 2880 4096
model.layers.{layer}.self_attn.q_proj.bias 4096
model.layers.{layer}.self_attn.q_proj.weight 4096 2880
model.layers.{layer}.self_attn.sinks 64
model.layers.{layer}.self_attn.v_proj.bias 512
model.layers.{layer}.self_attn.v_proj.weight 512 2880
model.norm.weight 2880
"""
GEMMA = """
model.embed_vision.embedding_projection.weight 5376 1152
model.language_model.embed_tokens.weight 262144 5376
model.language_model.layers.{sliding}.self_attn.k_norm.weight 256
model.language_model.layers.{sliding}.self_attn.k_proj.weight 4096 5376
model.language_model.layers.{sliding}.self_attn.o_proj.weight 5376 8192
model.language_model.layers.{sliding}.self_attn.q_norm.weight 256
model.language_model.layers.{sliding}.self_attn.q_proj.weight 8192 5376
model.language_model.layers.{sliding}.self_attn.v_proj.weight 4096 5376
model.language_model.layers.{layer}.input_layernorm.weight 5376
model.language_model.layers.{layer}.layer_scalar 1
model.language_model.layers.{layer}.mlp.down_proj.weight 5376 21504
model.language_model.layers.{layer}.mlp.gate_proj.weight 21504 5376
model.language_model.layers.{layer}.mlp.up_proj.weight 21504 5376
model.language_model.layers.{layer}.post_attention_layernorm.weight 5376
model.language_model.layers.{layer}.post_feedforward_layernorm.weight 5376
model.language_model.layers.{layer}.pre_feedforward_layernorm.weight 5376
model.language_model.layers.{full}.self_attn.k_norm.weight 512
model.language_model.layers.{full}.self_attn.k_proj.weight 2048 5376
model.language_model.layers.{full}.self_attn.o_proj.weight 5376 16384
model.language_model.layers.{full}.self_attn.q_norm.weight 512
model.language_model.layers.{full}.self_attn.q_proj.weight 16384 5376
model.language_model.norm.weight 5376
model.vision_tower.encoder.layers.{seen}.input_layernorm.weight 1152
model.vision_tower.encoder.layers.{seen}.mlp.down_proj.linear.weight 1152 4304
model.vision_tower.encoder.layers.{seen}.mlp.gate_proj.linear.weight 4304 1152
model.vision_tower.encoder.layers.{seen}.mlp.up_proj.linear.weight 4304 1152
model.vision_tower.encoder.layers.{seen}.post_attention_layernorm.weight 1152
model.vision_tower.encoder.layers.{seen}.post_feedforward_layernorm.weight 1152
model.vision_tower.encoder.layers.{seen}.pre_feedforward_layernorm.weight 1152
model.vision_tower.encoder.layers.{seen}.self_attn.k_norm.weight 72
model.vision_tower.encoder.layers.{seen}.self_attn.k_proj.linear.weight 1152 1152
model.vision_tower.encoder.layers.{seen}.self_attn.o_proj.linear.weight 1152 1152
model.vision_tower.encoder.layers.{seen}.self_attn.q_norm.weight 72
model.vision_tower.encoder.layers.{seen}.self_attn.q_proj.linear.weight 1152 1152
model.vision_tower.encoder.layers.{seen}.self_attn.v_proj.linear.weight 1152 1152
model.vision_tower.patch_embedder.input_proj.weight 1152 768
model.vision_tower.patch_embedder.position_embedding_table 2 10240 1152
model.vision_tower.std_bias 1152
model.vision_tower.std_scale 1152
"""


@dataclass(frozen=True)
class Listing:
    """A checkpoint. rows: a line a tensor, for all that `over` counts. tensors, numbers: as the listing adds
    them up."""

    config: dict
    rows: str
    over: dict
    tensors: int
    numbers: int

    def each(self):
        """(name, dtype, shape) of every tensor."""
        for line in self.rows.split("\n"):
            if words := line.split():
                name, *shape = words
                kind = shape.pop() if shape[-1] in KINDS else "BF16"
                counted = [key for key in self.over if f"{{{key}}}" in name]
                for found in itertools.product(*(self.over[key] for key in counted)):
                    yield name.format(**dict(zip(counted, found, strict=True))), kind, [*map(int, shape)]

    def write(self, folder):
        """config.json and two files of weights, whose data is a hole: nothing of it is read."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        every, where = list(self.each()), {}
        for part in range(2):
            file, header, end = f"model-{part + 1:05}-of-00002.safetensors", {}, 0
            for name, kind, shape in every[part::2]:
                count = KINDS[kind] * math.prod(shape)
                header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + count]}
                where[name], end = file, end + count
            text = json.dumps(header).encode()
            with (folder / file).open("wb") as opened:
                opened.write(len(text).to_bytes(8, "little") + text)
                opened.truncate(8 + len(text) + end)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": where})
        )
        return folder


def fp8(rows):
    """Those linear weights in FP8, each with a bf16 scale a block of 128 x 128."""
    found = []
    for name, n, k in (line.split() for line in rows.split("\n") if line):
        found += [f"{name} {n} {k} F8_E4M3", f"{name}_scale_inv {-(-int(n) // 128)} {-(-int(k) // 128)}"]
    return "\n".join(found)


MIXED = {"layer": range(48), "expert": range(128)}
LISTINGS = {
    "Llama-3.1-8B-Instruct": Listing(LLAMA_8B, LLAMA, {"layer": range(32)}, 291, 8_030_261_248),
    "Qwen3-8B": Listing(
        {k: v for k, v in QWEN3_8B.items() if k != "quantization_config"},
        QWEN3_REST + QWEN3_LINEAR, {"layer": range(36)}, 399, 8_190_735_360,
    ),
    "Qwen3-8B-FP8": Listing(
        QWEN3_8B, QWEN3_REST + fp8(QWEN3_LINEAR), {"layer": range(36)}, 651, 8_191_159_296
    ),
    "Qwen3-Coder-30B-A3B": Listing(CODER, MOE_REST + MOE_LINEAR, MIXED, 18_867, 30_532_122_624),
    # Of a sister of the same sizes, Qwen3-30B-A3B-Thinking-2507-FP8.
    "Qwen3-30B-A3B-FP8": Listing(
        CODER_FP8 | {"intermediate_size": 6144}, MOE_REST + fp8(MOE_LINEAR), MIXED, 37_491, 30_533_947_392
    ),
    # Blocks and scales count as bytes here.
    "gpt-oss-20b": Listing(gpt_oss(24, 32), GPT_OSS, {"layer": range(24)}, 459, 11_956_805_184),
    "gemma-4-31B": Listing(
        GEMMA_31B, GEMMA,
        {"layer": range(60), "seen": range(27), "full": range(5, 60, 6),
         "sliding": [i for i in range(60) if i % 6 != 5]},
        1_188, 31_273_088_876,
    ),
}  # fmt: skip
DRAFTERS = {
    "Qwen3-8B-DFlash-b16": Listing(PAIRS["Qwen3-8B-FP8"][1], DRAFTER, {"layer": range(5)}, 58, 1_048_626_432),
}
