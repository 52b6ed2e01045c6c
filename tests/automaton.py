"""Automaton pairs: hand-built target + DFlash drafter whose every token can be foretold.

The target is a finite automaton: one-hot embeddings pass untouched through its layers, so the head reads the
current token alone and names its successor. The drafter's one layer averages the context features it sees and
names the successor of the token that is in the majority. A slip in taps, norms, masks, chunks, RoPE or cache
turns rounds of 8 into rounds of 1 while the text stays right. FX names are those of the field log.
"""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

WIDTH, VOCAB, HEADS, HEAD_SIZE, FFN, MASK, EOS = 64, 64, 4, 16, 128, 63, 2
USUAL = {5: 20, 20: 20, 9: 20, 10: 30, 30: 31}
TABLES = {
    "FX-A": {"successor": {5: 6, 6: 7, 7: 2, 2: 2, 9: 2, 10: 11}},
    "FX-B": {"successor": USUAL},
    "FX-E": {"successor": {5: 20, 20: 20, 9: 20, 10: 30, 11: 31}, "recode": {1: {10: 9}, 2: {9: 11}}},
    "FX-H": {"successor": USUAL, "amplitude": 1e4},
    "FX-R": {"successor": USUAL, "theta": 1e7},
    "FX-L": {"successor": {5: 6, 6: 7, 7: 40, 40: 41, 41: 41, 9: 33}},
    "FX-S": {"successor": {5: {20: 0.5, 21: 0.3, 22: 0.2}, 20: {20: 0.2, 21: 0.5, 22: 0.3},
                           21: {20: 0.6, 21: 0.1, 22: 0.3}, 22: {20: 0.1, 21: 0.1, 22: 0.8}, 9: 20}},
}  # fmt: skip


def build(folder, name="FX-B", **changes):
    """Write the pair `name` under folder/target and folder/draft; `changes` are keywords of write_pair."""
    return write_pair(folder, **{**TABLES[name], **changes})


def write_pair(
    folder, successor, taps=(1,), recode=None, amplitude=1.0, theta=None, layers=4, block=8, mask=MASK,
    eos=EOS, max_pos=4096, pad=0, tied=False, ffn=FFN, target_config=None, draft_config=None,
):  # fmt: skip
    """Write one pair; returns (target folder, drafter folder).

    successor: token -> next token, or {token: probability}. recode: target layer -> {token a: token b}, where
    the residual stream stops saying a and says b. amplitude: scale of the residual stream. theta: RoPE base
    of the drafter, which then also attends by distance. pad: zero rows after the vocabulary. tied: no head
    tensor, so every token repeats. ffn: width of the MLPs, above all recoded tokens. target_config,
    draft_config: keys to set; a value of ... removes the key.
    """
    rows = VOCAB + pad
    embed = np.zeros((rows, WIDTH))
    embed[:VOCAB] = np.eye(VOCAB, WIDTH) * 8 * amplitude
    if mask not in successor:
        embed[mask] *= 0.05  # masks must not outvote the context
    head = np.zeros((rows, WIDTH))
    for token, nexts in successor.items():
        for following, chance in (nexts if isinstance(nexts, dict) else {nexts: 1.0}).items():
            head[following, token] = (
                12 + math.log(chance)
            ) / 8  # times 8, the normed stream: logits 12 + log p
    target = {"model.embed_tokens.weight": embed, "model.norm.weight": np.ones(WIDTH)}
    if not tied:
        target["lm_head.weight"] = head
    for i in range(layers):
        target |= _idle_layer(f"model.layers.{i}.", (recode or {}).get(i, {}), ffn)
    first_tap = np.zeros((WIDTH, len(taps) * WIDTH))
    first_tap[:, :WIDTH] = np.eye(WIDTH)
    draft = {"fc.weight": first_tap, "hidden_norm.weight": np.ones(WIDTH), "norm.weight": np.ones(WIDTH)}
    draft |= _voting_layer("layers.0.", theta is not None, ffn)
    shared = {
        "hidden_size": WIDTH, "intermediate_size": ffn, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
        "max_position_embeddings": max_pos, "hidden_act": "silu", "attention_bias": False,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": tied, "vocab_size": rows,
    }  # fmt: skip
    target_json = shared | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers,
        "bos_token_id": None, "eos_token_id": eos,
    }  # fmt: skip
    draft_json = shared | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1,
        "block_size": block,
        "num_target_layers": layers, "layer_types": ["full_attention"], "sliding_window": None,
        "use_sliding_window": False, "vocab_size": VOCAB, "rope_theta": theta or 10000.0,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(taps)},
    }  # fmt: skip
    folders = Path(folder) / "target", Path(folder) / "draft"
    parts = (target, target_json, target_config), (draft, draft_json, draft_config)
    for place, (tensors, config, changes) in zip(folders, parts, strict=True):
        place.mkdir(parents=True, exist_ok=True)
        write_safetensors(place / "model.safetensors", tensors)
        config = {key: value for key, value in (config | (changes or {})).items() if value is not ...}
        (place / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folders[0], eos)
    return folders


def _idle_layer(prefix, recode, ffn):
    """A target layer that adds nothing, but for the tokens that `recode` rewrites (its MLP does that)."""
    gate, down = np.zeros((ffn, WIDTH)), np.zeros((WIDTH, ffn))
    for old, new in recode.items():
        gate[old, old] = (
            1  # gate and up both read 8, so the product is 64: an eighth of it replaces the token
        )
        down[new, old], down[old, old] = 1 / 8, -1 / 8
    square = np.zeros((WIDTH, WIDTH))
    return _layer(prefix, square, square, square, square, gate, down)


def _voting_layer(prefix, by_distance, ffn):
    """A drafter layer that copies the mean of what it sees.
    by_distance: scores move with RoPE, not with content."""
    query_key = np.zeros((WIDTH, WIDTH))
    if by_distance:
        query_key[4::HEAD_SIZE] = 1  # pair (4, 12) if half-split: slow at theta 1e7; pair (4, 5): fast
    names = {f"{prefix}self_attn.{part}_norm.weight": np.ones(HEAD_SIZE) for part in "qk"}
    gate, down, eye = np.zeros((ffn, WIDTH)), np.zeros((WIDTH, ffn)), np.eye(WIDTH)
    return names | _layer(prefix, query_key, query_key, eye, eye, gate, down)


def _layer(prefix, q, k, v, o, gate, down):
    return {
        prefix + "input_layernorm.weight": np.ones(WIDTH),
        prefix + "post_attention_layernorm.weight": np.ones(WIDTH),
        prefix + "self_attn.q_proj.weight": q, prefix + "self_attn.k_proj.weight": k,
        prefix + "self_attn.v_proj.weight": v, prefix + "self_attn.o_proj.weight": o,
        prefix + "mlp.gate_proj.weight": gate, prefix + "mlp.up_proj.weight": gate,
        prefix + "mlp.down_proj.weight": down,
    }  # fmt: skip


def write_safetensors(path, tensors):
    """Write name -> array as one file: floats as BF16, uint16 as BF16 bits, f32 arrays stay F32."""
    header, blobs, end = {}, [], 0
    for name, array in tensors.items():
        array = np.asarray(array)
        if array.dtype == np.float64:
            array = array.astype(ml_dtypes.bfloat16)
        blob = array.tobytes()
        kind = "F32" if array.dtype == np.float32 else "BF16"
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + len(blob)]}
        end += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_tokenizer(folder, eos=EOS):
    """Words t0 ... t63, split at spaces."""
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(VOCAB)}, "unk_token": "t0"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    whole = {"version": "1.0", **empty, "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"model": model}))
    config = {"eos_token": f"t{eos}", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
