"""Every layout of a drafter is the same drafter: twins give the same drafts, and what a file does not say is
refused. models.md 7.1, 7.5, 7.7, 11.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from minidflash.weights import open_checkpoint
from minidflash.weights.drafter_names import bind_drafter

import minidflash as md
from minidflash.config import read_drafter
from minidflash.errors import UserError
from tests.chance import filtered, surprise
from tests.golden_files import golden
from tests.layouts import as_gguf, copy, sharded, widened, with_tables
from tests.models import ROUNDS_TOKENS, clipped, engine_of, forward, logits_of, numbers, state_of, target_of
from tests.refusals import refused

TRAINED, REDUCED, SCALED = "dflash-qwen3-trained", "dflash-speculators-tiny", "dflash-llama-scaled-tiny"
THEIRS = "config.speculators.json"


def load(name, drafter, **options):
    """An engine on a golden target and the drafter in a folder or file; golden pairs are kept."""
    if drafter == golden(name) and not options:
        return engine_of(target_of(name), name, "numba", "f32")
    return md.load(
        str(golden(target_of(name))), drafter=str(drafter), **{"backend": "numba", "warm": False, **options}
    )


def drafts(name, drafter, p=1, block=8):
    """[(drafts, tokens)] of the rounds behind a golden prompt; tokens and rounds are the reference's."""
    g = numbers(name)
    want = g[f"b{block}.p{p}.output_ids"]
    prompt = want[:-ROUNDS_TOKENS].tolist()
    found = list(md.stream(load(name, drafter), prompt, max_tokens=ROUNDS_TOKENS, block=block, verify=block))
    assert [token for r in found for token in r.tokens] == want[-ROUNDS_TOKENS:].tolist()
    return [(r.drafted, r.tokens) for r in found]


def golden_rounds(name, p=1, block=8):
    return clipped(numbers(name)[f"b{block}.p{p}.acceptance_lengths"], ROUNDS_TOKENS)


TWINS = {
    "toplevel": lambda at: (SCALED, copy(SCALED, at, "config.toplevel.json")),
    "speculators": lambda at: (TRAINED, copy(TRAINED, at, THEIRS)),
    "speculators, class name": lambda at: (
        TRAINED, copy(TRAINED, at, THEIRS, architectures=["DFlashSpeculator"])),
    "speculators, copies": lambda at: (
        TRAINED, with_tables(TRAINED, "qwen3-tiny", at, THEIRS, ["verifier_lm_head.weight"])),
    "own tables": lambda at: (TRAINED, with_tables(TRAINED, "qwen3-tiny", at)),
    "shards": lambda at: (TRAINED, sharded(TRAINED, at)),
    "reduced shards": lambda at: (REDUCED, sharded(REDUCED, at)),
    "gguf": lambda at: (TRAINED, as_gguf(TRAINED, at.with_suffix(".gguf"))),
    "gguf causal": lambda at: (
        "dflash-qwen3-causal-tiny", as_gguf("dflash-qwen3-causal-tiny", at.with_suffix(".gguf"))),
    "gguf two-sided": lambda at: (
        "dflash-qwen3-noncausal-tiny", as_gguf("dflash-qwen3-noncausal-tiny", at.with_suffix(".gguf"))),
    "gguf reduced": lambda at: (REDUCED, as_gguf(REDUCED, at.with_suffix(".gguf"))),
    "gguf own tables": lambda at: (
        TRAINED, as_gguf(TRAINED, at.with_suffix(".gguf"), tables="qwen3-tiny")),
}  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_drafts_the_same(tmp_path, twin):
    """Drafts of the golden drafter and of its twin, and the reference's rounds."""
    name, drafter = TWINS[twin](tmp_path / "twin")
    found = drafts(name, drafter)
    assert found == drafts(name, golden(name))
    assert [len(tokens) for _, tokens in found][1:] == golden_rounds(name)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_a_gguf_file_s_types_are_the_values_that_they_stand_for(tmp_path, kind):
    """Against the values as the gguf package widens them."""
    path = as_gguf(TRAINED, tmp_path / "twin.gguf", kind)
    assert drafts(TRAINED, path) == drafts(TRAINED, widened(TRAINED, tmp_path / "wide", path))


def test_both_spellings_say_the_same(tmp_path):
    """What z-lab, speculators and GGUF say of one drafter is read alike."""

    def read(name, file="config.json"):
        return read_drafter(json.loads((golden(name) / file).read_text()))

    zlab, theirs = read(TRAINED), read(TRAINED, THEIRS)
    assert replace(theirs, layout="z-lab", target_layers=4) == zlab
    assert read(SCALED) == read(SCALED, "config.toplevel.json")
    more = {"final_logit_softcapping": 9.0, "logit_scale": 0.375, "embedding_scale": 1.75,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128}  # fmt: skip
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    own = copy(TRAINED, tmp_path / "own", rope_scaling=rope, dflash_config__final_logit_softcapping=9.0,
               dflash_config__output_multiplier=0.375, input_embedding_scale=1.75)  # fmt: skip
    zlab = read_drafter(json.loads((own / "config.json").read_text()))
    file = open_checkpoint(str(as_gguf(TRAINED, tmp_path / "f.gguf", **more)), "drafter")
    found = read_drafter(file.config, file.tensors)
    assert np.float32(found.eps) == np.float32(zlab.eps)
    assert replace(found, layout="z-lab", target_layers=4, eps=zlab.eps) == zlab


@pytest.mark.parametrize("name", [REDUCED, SCALED])
def test_drafted_text_is_plain_text(name):
    """Greedy for all blocks, and drawn by one law or the other."""
    engine = load(name, golden(name))
    prompt = numbers(target_of(name))["p1.input_ids"].tolist()
    laws = {}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "top_p": 0.8, "seed": 4}
    plain = [md.generate(engine, prompt, max_tokens=20, drafter=False, **law).tokens for law in laws]
    for block in range(1, 17):
        for i in (0, 1 + block % 2):
            found = md.generate(engine, prompt, max_tokens=20, block=block, verify=block, **laws[i])
            assert found.tokens == plain[i], (laws[i], block)


@pytest.mark.parametrize("name", [REDUCED, SCALED])
def test_drawn_drafts_leave_the_target_s_law(name):
    """The first two tokens of 400 answers, the second of a round of rejection sampling; a reduced head drafts
    few of the likeliest ids, yet all come out."""
    engine, law = load(name, golden(name)), {"temperature": 1.5, "top_k": 5}
    prompt = numbers(target_of(name))["p1.input_ids"].tolist()

    def chances(ids):
        _, rows = forward(engine, state_of(engine, 64), ids)
        return filtered(logits_of(engine, rows)[-1].astype(np.float64), **law)

    first, vocab = chances(prompt), engine.target.config.vocab
    want = np.zeros((vocab, vocab))
    for token in np.flatnonzero(first):
        want[token] = first[token] * chances([*prompt, int(token)])
    result = md.generate(
        engine, prompt, max_tokens=4, samples=400, accept="reject", block=3, verify=3, seed=8, **law
    )
    counts = np.zeros((vocab, vocab))
    for one in result.samples:
        counts[tuple(one["tokens"][:2])] += 1
    assert surprise(counts, want) < 4.5
    assert any(length > 1 for one in result.samples for length in one["rounds"]), "no draft was kept"
    if name == REDUCED:
        names = set(engine.ops.download(engine.drafter.names).tolist())
        assert any(j not in names for j in np.flatnonzero(counts.sum(0))), "the test sees no id outside"


def test_a_token_outside_is_never_proposed():
    engine = load(REDUCED, golden(REDUCED), backend="oracle")
    names = set(engine.ops.download(engine.drafter.names).tolist())
    prompt = numbers(target_of(REDUCED))["p0.input_ids"].tolist()
    for law in ({}, {"temperature": 2.0, "accept": "reject", "seed": 1}):
        rounds = list(md.stream(engine, prompt, max_tokens=20, block=8, verify=8, **law))
        drafted = {token for r in rounds for token in r.drafted or ()}
        assert drafted <= names and len(drafted) > 5
        mass = engine.state.mass
        if law:
            others = sorted(set(range(engine.target.config.vocab)) - names)
            assert not engine.ops.download(mass)[0, 1:][:, others].any()
            assert (engine.ops.download(mass)[0, 1:].sum(1) > 0).all()


# ---- refusals ----------------------------------------------------------------------------------------------


def edited(name, at, change):
    """The golden drafter with its tensors changed by change(tensors)."""
    from safetensors.numpy import load_file, save_file

    copy(name, at)
    tensors = load_file(at / "model.safetensors")
    change(tensors)
    save_file(tensors, at / "model.safetensors")
    return at


@pytest.mark.parametrize("case, words", {
    "order": ("d2t", "ascending"), "beyond": ("d2t", "383"), "marks": ("t2d", "d2t"),
    "head": ("lm_head.weight", "[149, 80]"), "few": ("d2t", "[149]"),
}.items())  # fmt: skip
def test_a_reduced_vocabulary_that_is_wrong_is_refused(tmp_path, case, words):
    def change(tensors):
        if case == "order":
            tensors["d2t"][[3, 4]] = tensors["d2t"][[4, 3]] + [9, -9]
        if case == "beyond":
            tensors["d2t"][-1] += 384
        if case == "marks":
            tensors["t2d"] = np.roll(tensors["t2d"], 1)
        if case in ("head", "few"):
            key = "lm_head.weight" if case == "head" else "d2t"
            tensors[key] = np.ascontiguousarray(tensors[key][:-1])

    refused(lambda: load(REDUCED, edited(REDUCED, tmp_path / "x", change)), *words)


def test_a_gguf_file_says_which_layers_slide_and_whether_they_are_causal(tmp_path):
    name = "dflash-qwen3-causal-tiny"
    whole = open_checkpoint(str(as_gguf(name, tmp_path / "a.gguf")), "drafter")
    for key in ("attention.causal", "attention.sliding_window_pattern", "attention.sliding_window"):
        config = {path: value for path, value in whole.config.items() if path != f"dflash.{key}"}
        refused(lambda config=config: read_drafter(config, whole.tensors), f"dflash.{key} is missing")
    for value in (2, [True], [1, 0]):
        wrong = whole.config | {"dflash.attention.sliding_window_pattern": value}
        refused(lambda wrong=wrong: read_drafter(wrong, whole.tensors), "sliding_window_pattern")


@pytest.mark.parametrize("one, key, value", [
    ("tokenizer.ggml.mask_token_id", "dflash.mask_token_id", 383),
    ("tokenizer.ggml.tokens", "dflash.vocab_size", 384),
])  # fmt: skip
def test_either_of_two_keys_says_it_and_both_say_the_same(files, one, key, value):
    config, tensors = files["gguf"].config, files["gguf"].tensors
    usual, others = read_drafter(config, tensors), {k: v for k, v in config.items() if k != one}
    assert (
        read_drafter(others | {key: value}, tensors) == usual == read_drafter(config | {key: value}, tensors)
    )
    refused(lambda: read_drafter(config | {key: value + 1}, tensors), key, f"{value + 1}", f"{value}")
    assert read_drafter(config | {"quantize.imatrix.file": "x.dat"}, tensors) == usual


def test_the_fused_feature_s_norm_has_two_names(files):
    config, tensors = read_drafter(files["gguf"].config, files["gguf"].tensors), dict(files["gguf"].tensors)
    name, other = "enc.output_norm.weight", "enc_output_norm.weight"
    (usual,) = bind_drafter(config, tensors)["hidden_norm"].parts
    renamed = {other if key == name else key: value for key, value in tensors.items()}
    assert bind_drafter(config, renamed)["hidden_norm"].parts == [usual] and usual.name == name
    refused(lambda: bind_drafter(config, renamed | {name: usual}), name, "unknown")


def test_speculators_say_whether_windows_are_causal():
    config = json.loads((golden(TRAINED) / THEIRS).read_text())
    body = config["transformer_layer_config"] | {
        "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True,
        "sliding_window": 9,
    }  # fmt: skip
    config |= {"transformer_layer_config": body}
    for two_sided in (False, True):
        found = read_drafter(config | {"sliding_window_non_causal": two_sided})
        assert found.each("causal") == (not two_sided, False) and found.each("window") == (9, 0)
    del config["sliding_window_non_causal"]
    refused(lambda: read_drafter(config), "sliding_window_non_causal is missing")


def test_what_speculators_leave_out_is_their_class_s():
    config = json.loads((golden(TRAINED) / THEIRS).read_text())
    body = {key: value for key, value in config["transformer_layer_config"].items() if key != "rms_norm_eps"}
    usual = read_drafter(config)
    assert read_drafter(config | {"transformer_layer_config": body}) == usual
    assert read_drafter(config | {"transformer_layer_config": body | {"rms_norm_eps": 1e-5}}) != usual
    del body["rope_parameters"]
    wanted = "transformer_layer_config.rope_theta is missing"
    refused(lambda: read_drafter(config | {"transformer_layer_config": body}), wanted)


@pytest.mark.parametrize(
    "key", ["draft_vocab_size", "block_size", "mask_token_id", "aux_hidden_state_layer_ids"]
)
def test_what_speculators_must_say_is_missed_by_name(key):
    config = json.loads((golden(REDUCED) / "config.json").read_text())
    refused(lambda: read_drafter({k: v for k, v in config.items() if k != key}), f"{key} is missing")


def test_tables_of_another_vocabulary_are_refused(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = np.zeros((390, 80), np.float32)

    at = edited(TRAINED, tmp_path / "x", change)
    refused(lambda: load(TRAINED, at), "lm_head.weight")
    config = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(config | {"vocab_size": 390}))
    refused(lambda: load(TRAINED, at), "lm_head.weight", "390", "384", "not a pair")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(metadata or config, tensors) of a drafter in each layout."""
    at = tmp_path_factory.mktemp("files")
    gguf_file = open_checkpoint(str(as_gguf("dflash-qwen3-causal-tiny", at / "a.gguf")), "drafter")
    small_file = open_checkpoint(str(as_gguf(REDUCED, at / "b.gguf")), "drafter")
    found = {"gguf": gguf_file, "gguf reduced": small_file}
    for name in (REDUCED, SCALED):
        found[name] = open_checkpoint(str(golden(name)), "drafter")
    return found


LAYOUTS_HERE = ["gguf", "gguf reduced", REDUCED, SCALED]
OPTIONAL = {"t2d"}  # d2t says the same


@pytest.mark.parametrize("name", LAYOUTS_HERE)
def test_every_tensor_is_needed_as_it_is(files, name):
    config, tensors = files[name].config, dict(files[name].tensors)

    def bind(found):
        return bind_drafter(read_drafter(config, found), found)

    assert bind(tensors)
    for one, tensor in tensors.items():
        others = {key: value for key, value in tensors.items() if key != one}
        retyped = replace(tensor, dtype="I32")
        reshaped = replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] + 1))
        if one not in OPTIONAL and not (
            one == "d2t" and name == "gguf reduced"
        ):  # it says the size of the head
            refused(lambda others=others: bind(others), one)
        refused(lambda others=others, wrong=retyped, one=one: bind(others | {one: wrong}), one, "I32")
        words = {"fc.weight": "fc", "d2t": "[15"}.get(one, one)
        refused(lambda others=others, wrong=reshaped, one=one: bind(others | {one: wrong}), words)
        refused(lambda others=others, one=one, tensor=tensor: bind(others | {one + "_": tensor}), one)
        another = replace(tensor, name=one + ".more")
        refused(lambda another=another: bind(tensors | {another.name: another}), another.name)


def leaves(config, path=()):
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        is_list = isinstance(value, list) and value and isinstance(value[0], dict)
        if isinstance(value, dict) or is_list:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def set_at(config, path, value):
    config = json.loads(json.dumps(config))
    place = config
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return config


# They change nothing: bookkeeping, information; or nothing where no layer slides.
HARMLESS = {
    "architectures", "auto_map", "AutoModel", "", "dtype", "transformers_version", "initializer_range",
    "use_cache", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id", "max_window_layers",
    "name_or_path", "tie_word_embeddings", "speculators_version", "sliding_window_non_causal",
    "model_type", "general.name", "general.alignment", "GGUF.version",
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS_HERE)
def test_every_key_counts(files, name):
    """A key that is changed changes what is read, or is refused by name; an unknown one is refused."""
    from tests.test_fail_closed import other_than

    config, tensors = files[name].config, files[name].tensors
    usual, seen = read_drafter(config, tensors), 0
    for path, value in leaves(config):
        if path[-1] in HARMLESS or value is None:
            continue
        if path[-1] == "use_sliding_window" and not any(usual.each("window")):
            continue
        seen += 1
        wrong = set_at(config, path, other_than(value))
        try:
            assert read_drafter(wrong, tensors) != usual, f"{path}: nothing changes"
        except UserError as error:
            near = {"num_hidden_layers": "layer_types", "layer_types": "sliding_window",
                    "hidden_size": "head", "use_sliding_window": "layer_types", "rope_type": "rope_t",
                    "dflash.block_count": "sliding_window_pattern"}.get(path[-1], path[-1])  # fmt: skip
            assert str(path[-1]) in f"{error}" or near in f"{error}", f"{path}: {error}"
        refused(
            lambda path=path: read_drafter(set_at(config, (*path[:-1], "mystery"), 1), tensors), "mystery"
        )
    assert seen > 15
