"""Field log 1, wiring between target and drafter: a slip leaves the text right and acceptance gone.

The automata of tests/automaton.py make every slip visible as rounds of 1 instead of rounds of 8.
"""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

import minidflash as md
from minidflash.errors import UserError
from tests.automaton import TABLES, build
from tests.random_pair import write_random
from tests.stages import compare_stages

WHOLE = 64  # verify at the whole block, as the field log means it


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")


def P(before, count, last):
    """P(9x40,5) of the field log."""
    return [before] * count + [last]


def load(tmp_path, name="FX-B", engine=None, **changes):
    target, drafter = build(tmp_path, name, **changes)
    return md.load(str(target), drafter=str(drafter), **{"warm": False, **(engine or {})})


def run(engine, prompt, count=33, **options):
    """Rounds of a drafted run, whose ids must be the plain ones."""
    plain = md.generate(engine, prompt, max_tokens=count, drafter=None)
    drafted = md.generate(engine, prompt, max_tokens=count, **{"verify": WHOLE, **options})
    assert drafted.tokens == plain.tokens and drafted.text == plain.text
    assert drafted.finish_reason == plain.finish_reason
    return drafted.rounds


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("backend", ["numba", "oracle"])
def test_f01_a_tap_is_the_output_of_its_layer(tmp_path, backend, activations):
    options = {"backend": backend, "activations": activations}
    for taps, rounds in (((1,), [8] * 4), ((0,), [1] * 32), ((2,), [1] * 32)):
        engine = load(tmp_path / str(taps), "FX-E", options, taps=taps)
        assert run(engine, P(10, 60, 5)) == rounds, taps


def test_f01_taps_lie_side_by_side_in_their_order(tmp_path):
    """The drafter of the automata reads the first tap only."""
    for taps, rounds in (((1, 2), [8] * 4), ((0, 1), [1] * 32), ((1, 2), [8] * 4)):
        assert run(load(tmp_path / str(taps), "FX-E", taps=taps), P(10, 60, 5)) == rounds


@pytest.mark.parametrize("row, name, changes, words", [
    ("F03", "FX-E", {"dflash_config": {"mask_token_id": 63}}, "target_layer_ids"),
    ("F02", "FX-E", {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2]}, "speculators"),
    ("F02", "FX-E", {"transformer_layer_config": {}}, "speculators"),
    ("F06", "FX-B", {"draft_vocab_size": 32}, "draft_vocab_size"),
    ("F09", "FX-B", {"sample_from_anchor": True}, "sample_from_anchor"),
    ("F16", "FX-R", {"rope_scaling": {"rope_type": "mystery"}}, "mystery"),
    ("F17", "FX-B", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ("F27", "FX-B", {"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
    ("F27", "FX-B", {"dflash_config": {"target_layer_ids": [1], "mask_token_id": -1}}, "mask_token_id"),
    ("F27", "FX-B", {"dflash_config": {"target_layer_ids": [1], "mask_token_id": 69}}, "mask_token_id"),
    ("F03", "FX-B", {"block_size": ...}, "block_size"),
])  # fmt: skip
def test_a_config_that_cannot_be_obeyed_stops_the_load(tmp_path, row, name, changes, words):
    with pytest.raises(UserError, match=words):
        load(tmp_path, name, draft_config=changes)


@pytest.mark.parametrize("row, changes, words", [
    ("F12", {"quantization_config": {"quant_method": "rotated"}}, "quantization_config"),
    ("F17", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
])  # fmt: skip
def test_a_target_that_is_not_understood_stops_the_load(tmp_path, row, changes, words):
    with pytest.raises(UserError, match=words):
        load(tmp_path, target_config=changes)


def test_f05_the_final_norm_comes_once_before_the_head(ops, rng):
    T, D, V = 16, 60, 131
    norm = rng.uniform(0.05, 3, D).astype(np.float32)
    head = rng.standard_normal((V, D)).astype(np.float32)
    x = (rng.standard_normal((T, D)) * 2).astype(ml_dtypes.bfloat16)

    class Part:  # what the checkpoint reader hands to a backend
        array, dtype, shape = head, "F32", head.shape

        def drop(self):
            pass

    def rms(y):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)

    rows = ops.array((T, D), "A")
    ops.upload(rows, x.view(np.uint16) if ops.activations == "bf16" else x.astype(np.float32))
    ids, pick = ops.array((T,), "i32"), ops.array((T,), "i32")
    scale = ops.array((D,), "f32")
    ops.upload(pick, np.arange(T, dtype=np.int32))
    ops.upload(scale, norm)
    work = ops.array((ops.backend.work_size(T, D, V),), "f32")
    ops.head(rows, pick, scale, 1e-6, ops.weight([Part()]), V, ids, None, work)
    found, wide = ops.download(ids), x.astype(np.float64)
    once = (norm * rms(wide)) @ head.T
    assert np.array_equal(found, once.argmax(-1))
    for wrong in (rms(wide) @ head.T, (norm * rms(norm * rms(wide))) @ head.T):
        assert not np.array_equal(found, wrong.argmax(-1))


def test_f07_padding_rows_of_the_target_are_harmless(tmp_path):
    engine = load(tmp_path, pad=8, draft_config={"vocab_size": 64})
    assert engine.target.config.vocab == 72
    assert run(engine, P(9, 40, 5)) == [8] * 4
    ids = md.generate(engine, P(9, 40, 7), max_tokens=50).tokens  # 7 has no successor: all logits are equal
    assert max(ids) < 64


def test_f08_only_a_smaller_drafter_vocabulary_needs_a_map(tmp_path):
    assert run(load(tmp_path, draft_config={"vocab_size": 72}), P(9, 40, 5)) == [8] * 4


@pytest.mark.parametrize("block", [1, 2, 3, 8, 9, 16, 64])
def test_f09_f10_every_block(tmp_path, block):
    engine = load(tmp_path)
    prompt = P(9, 40, 5)
    rounds = list(md.stream(engine, prompt, max_tokens=130, block=block, verify=WHOLE))
    ids = [token for r in rounds for token in r.tokens]
    assert ids == md.generate(engine, prompt, max_tokens=130, drafter=None).tokens
    assert all(
        len(r.drafted) == block - 1 and r.verify == block for r in rounds[1:]
    )  # B slots, B - 1 proposals
    assert all(len(r.tokens) == block for r in rounds[1:-1])


@pytest.mark.parametrize("block", [65, 0, -1, 1000, 2.0, True, "8"])
def test_f10_blocks_that_cannot_be(tmp_path, block):
    with pytest.raises(UserError, match="block"):
        md.generate(load(tmp_path), [5], block=block)


@pytest.mark.parametrize("verify", [1, 2, 3, 7, 8, 9, 500, "auto"])
def test_f10_every_verify_width(tmp_path, verify):
    rounds = run(load(tmp_path), P(9, 40, 5), 60, verify=verify)
    if verify != "auto":
        assert set(rounds[:-1]) == {min(verify, 8)}


@pytest.mark.parametrize("amplitude", [1e-4, 1.0, 1e4, 1e6])
@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_f11_f13_activations_and_caches_of_either_type(tmp_path, activations, amplitude):
    """FX-H and beyond: large and small streams; the invariants check that everything stays finite."""
    engine = load(tmp_path, "FX-H", {"activations": activations}, amplitude=amplitude)
    assert run(engine, P(9, 40, 5)) == [8] * 4


def test_f13_padding_rows_that_are_not_finite_are_noticed(tmp_path):
    """Ids that the tokenizer does not have are never chosen, so only the check looks at their logits."""
    engine = load(tmp_path, pad=16)
    poison(engine.target.weights["head"], row=70)
    with pytest.raises(AssertionError, match="finite"):
        md.generate(engine, P(9, 40, 5), max_tokens=20)
    assert not engine.is_busy


def poison(weight, row):
    """NaN in a row of a weight that the CPU packed."""
    weight.data[row // 16, :, row % 16] = 0x7FC0


def test_f14_rotary_pairs_are_half_split(tmp_path):
    assert run(load(tmp_path / "half", "FX-R"), P(9, 40, 5)) == [8] * 4
    prompt = [9] * 100 + [10] * 60 + [5]  # the majority lies far away
    assert run(load(tmp_path / "far", "FX-R"), prompt) == [8] * 4
    # Interleaved, component 4 pairs with 5 and turns as fast as the half-split components 2 and 10.
    target, drafter = build(tmp_path / "interleaved", "FX-R")
    moved = ("q_proj.weight", "k_proj.weight")
    change_tensors(drafter, lambda name, x: np.roll(x, -2, axis=0) if name.endswith(moved) else x)
    engine = md.load(str(target), drafter=str(drafter), warm=False)
    assert run(engine, prompt)[:8] == [1] * 8  # until the answer itself is the majority


def change_tensors(folder, change):
    """Rewrite a BF16 checkpoint; change: (name, bits) -> bits."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        x = np.frombuffer(bytes(body[a:b]), np.uint16).reshape(entry["shape"])
        body[a:b] = np.ascontiguousarray(change(name, x)).tobytes()
    path.write_bytes(raw[: 8 + size] + body)


def test_f16_no_scaling_means_no_scaling(tmp_path):
    for i, rope in enumerate((None, ..., {"rope_type": "default"})):
        changes = {"rope_scaling": rope}
        assert run(load(tmp_path / str(i), "FX-R", draft_config=changes), P(9, 40, 5)) == [8] * 4


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("context", [0, 3, 4, 5, 6, 40])
def test_f19_windows_of_a_block_against_a_dense_mask(ops, rng, context, causal):
    """Keys 0..context-1 are the context, the block of 3 follows. Bidirectional: |q - k| < W;
    causal: models.md 7.5."""
    block, heads, size = 3, 2, 16
    q = rng.standard_normal((block, heads, size)).astype(ml_dtypes.bfloat16)
    k, v = rng.standard_normal((2, heads, context + block, size)).astype(ml_dtypes.bfloat16)
    cache_k, cache_v = (np.zeros((1, heads, context + block + 4, size), ml_dtypes.bfloat16) for _ in "kv")
    cache_k[0, :, : context + block], cache_v[0, :, : context + block] = k, v
    cache_k[0, :, context + block :], cache_v[0, :, context + block :] = 1e30, np.nan  # rows nobody may see

    def put(x):
        buffer = ops.array(x.shape, "A")
        ops.upload(buffer, x.view(np.uint16) if ops.activations == "bf16" else x.astype(np.float32))
        return buffer

    def integers(values):
        buffer = ops.array((len(values),), "i32")
        ops.upload(buffer, np.array(values, np.int32))
        return buffer

    pos = [context + i for i in range(block)]
    begin = [context] * block if causal else pos  # what the drafter gives, see minidflash/drafter.py
    work = ops.array((ops.backend.work_size(16, 64, 64),), "f32")
    a, b = np.array(pos)[:, None], np.arange(context + block)[None]
    scores = np.einsum("ihd,hjd->hij", q.astype(np.float64), k.astype(np.float64)) * size**-0.5
    for window in (0, 1, 2, 4, 5):
        o = ops.array(q.shape, "A")
        ops.attend(
            put(q), put(cache_k), put(cache_v), integers([0] * block), integers(pos), integers(begin),
            integers([context + block] * block), window, causal, size**-0.5, None, work, o,
        )  # fmt: skip
        found = ops.download(o)
        found = (found.view(ml_dtypes.bfloat16) if found.dtype == np.uint16 else found).astype(np.float64)
        near = np.abs(a - b) < window if window else np.full((block, context + block), True)
        mask = (near | (b >= context)) & (b <= a) if causal else near
        p = np.where(mask, np.exp(scores), 0)
        want = np.einsum("hij,hjd->ihd", p / p.sum(-1, keepdims=True), v.astype(np.float64))
        assert np.abs(found - want).max() < (2e-2 if ops.activations == "bf16" else 1e-5), window


def test_f20_long_contexts_keep_drafting(tmp_path):
    engine = load(tmp_path, max_pos=16384)
    assert engine.ctx == 16384
    result = md.generate(engine, P(9, 6000, 5), max_tokens=33, verify=WHOLE)
    assert result.rounds == [8] * 4 and result.drafter and result.stats.drafted == 28


@pytest.mark.parametrize("context", [5, 500, 5000])
def test_f21_f25_every_stage_of_a_draft_far_from_the_origin(tmp_path, context):
    """Each stage of a draft against float64 with a dense mask over absolute positions,
    with and without windows."""
    kinds = ["sliding_attention", "full_attention"]
    for i, windows in enumerate((None, (kinds, 9, False), (kinds, 9, True))):
        target, drafter = write_random(tmp_path / str(i), "grouped", windows=windows, max_pos=6000)
        engine = md.load(str(target), drafter=str(drafter), activations="f32", warm=False)
        prompt = np.random.default_rng(context).integers(0, 97, context).tolist()
        compare_stages(engine, prompt)


def test_f24_plain_calls_capture_nothing_and_grow_nothing(tmp_path):
    engine = load(tmp_path)
    md.generate(engine, P(9, 40, 5), max_tokens=9)
    for i in range(50):
        md.generate(engine, P(9, 40, 5), max_tokens=9, drafter=None)
        if i == 1:
            before = resident()
    assert resident() - before < 1 << 20
    if engine.state.taps is not None:  # the buffers of the last drafted run may stay, and nobody writes them
        engine.state.taps[...], engine.state.injected.k[...] = 7, 7
        md.generate(engine, P(9, 40, 5), max_tokens=9, drafter=None)
        assert (engine.state.taps == 7).all() and (engine.state.injected.k == 7).all()


def resident():
    """Bytes of memory this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_f95_each_pairing_has_its_own_taps(tmp_path):
    one, other = (load(tmp_path / str(tap), "FX-E", taps=(tap,)) for tap in (1, 0))
    fresh = {"state": None, "state_shape": None, "programs": {}, "schedule": None}
    second = dataclasses.replace(one, drafter=other.drafter, **fresh)  # the same target object
    assert second.target is one.target
    for engine, want in ((one, 8), (second, 1), (one, 8), (second, 1)):
        assert set(run(engine, P(10, 60, 5))) == {want}


@pytest.mark.parametrize("name", [name for name in TABLES if name not in ("FX-A", "FX-L", "FX-S")])
@pytest.mark.parametrize("chunk", [1, 5, 41, 256])
def test_every_chunk_of_the_prompt_reaches_the_drafter(tmp_path, name, chunk):
    first = 10 if name == "FX-E" else 9
    assert run(load(tmp_path, name, {"prefill_chunk": chunk}), P(first, 60, 5)) == [8] * 4
