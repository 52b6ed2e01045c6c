"""info, kernels, verify and bench: what they say, and that it is true."""

import json

import pytest
from minidflash.kernels.table import ROWS

import minidflash as md
from minidflash import fit
from tests import automaton


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target, draft = automaton.build(tmp_path_factory.mktemp("FX-B"), "FX-B")
    return ["--target", str(target), "--drafter", str(draft)]


def test_info_names_facts_with_their_keys_and_backends_with_reasons(mdf, pair):
    code, out, _ = mdf("info", *pair, "--json")
    found = json.loads(out)
    assert code == 0
    facts = found["drafter"]["facts"]
    assert facts["taps"] == {"value": [1], "from": "dflash_config.target_layer_ids"}
    assert facts["mask_id"] == {"value": 63, "from": "dflash_config.mask_token_id"}
    assert facts["block"]["value"] == 8
    assert found["target"]["facts"]["ropes"]["value"][0]["theta"] == 10000.0
    assert found["target"]["files"]["model.safetensors"] > 100_000
    assert found["backends"]["oracle"] is None
    assert all(reason is None or reason for reason in found["backends"].values())
    text = mdf("info", *pair)[1]
    for words in ("backends", "taps", "from dflash_config.target_layer_ids", "memory needed", "all keys x 4"):
        assert words in text


@pytest.mark.parametrize("ctx", [100, 4096])
def test_memory_is_foretold_to_the_byte(mdf, pair, ctx):
    memory = json.loads(mdf("info", *pair, "--json", "--ctx", ctx)[1])["memory"]
    engine = md.load(pair[1], drafter=pair[3], ctx=ctx)
    held = md.generate(engine, [9, 5], max_tokens=4).to_json()["memory_bytes"]
    assert memory["bytes"] == held
    assert memory["total"] == sum(held.values())


def test_the_default_context_is_what_memory_holds(pair, monkeypatch):
    roomy = md.load(pair[1], drafter=pair[3], warm=False)
    monkeypatch.setattr(fit, "free_memory", lambda: 8_000_000)
    tight = md.load(pair[1], drafter=pair[3], warm=False)
    assert (roomy.ctx, tight.ctx) == (4096, 2048)
    monkeypatch.setattr(fit, "free_memory", lambda: None)
    assert md.load(pair[1], drafter=pair[3], warm=False).ctx == 4096


def test_info_refuses_what_generate_refuses_with_the_suggested_taps(mdf, tmp_path):
    gone = {"dflash_config": {"mask_token_id": 63}, "num_target_layers": 8}
    target, draft = automaton.build(tmp_path, "FX-B", layers=8, draft_config=gone)
    code, out, err = mdf("info", "--target", target, "--drafter", draft)
    assert (code, out) == (2, "")
    assert "target_layer_ids is missing" in err
    assert "[4]" in err


def test_kernels_prints_the_table_and_explains_a_row(mdf):
    code, out, _ = mdf("kernels")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(ROWS)
    for name in ROWS:
        code, out, _ = mdf("kernels", name)
        assert code == 0
        assert out.startswith(f"{name}: ")
        assert "kernels/oracle" in out
        assert "kernels/cpu/" in out
        assert "?" not in out.split("dims: ")[1].splitlines()[0]
    assert mdf("kernels", "nothing")[0] == 2


def test_verify_passes_and_a_wrong_kernel_fails(mdf, pair, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text(
        '{"kind": "a", "tokens": [9, 9, 5]}\n{"kind": "a", "tokens": [9, 9, 9, 5]}\n'
    )
    argv = ["verify", *pair, "--prompts", tmp_path / "p.jsonl", "-n", 20]
    code, out, _ = mdf(*argv)
    assert code == 0
    assert out.endswith("all checks passed\n")
    assert out.count("drafted == plain") == 3
    from minidflash.kernels import oracle

    monkeypatch.setitem(oracle.GATES, oracle.SILU, lambda z: z)
    code, out, _ = mdf(*argv, "-q")
    assert code == 1
    assert "FAILED  gate_up == oracle (numba): h is off by" in out
    assert out.endswith("1 checks failed\n")


def test_bench_measures_both_ways_and_warns_of_loops(mdf, pair, tmp_path):
    lines = '{"kind": "loop", "tokens": [9, 9, 9, 5]}\n\n{"kind": "words", "prompt": "t9 t9 t5"}\n'
    (tmp_path / "p.jsonl").write_text(lines)
    argv = ["bench", *pair, "--prompts", tmp_path / "p.jsonl", "-n", 60, "-r", 1, "--verify", 8]
    code, out, err = mdf(*argv, "-o", "json")
    assert code == 0
    rows = {row["kind"]: row for row in json.loads(out)["rows"]}
    assert set(rows) == {"loop", "words", "all"}
    assert rows["loop"]["tau"] == pytest.approx(59 / 8)
    assert rows["loop"]["longest_run"] == 60
    assert rows["all"]["is_lossless"]
    assert rows["all"]["break_even_tau"] > 0
    assert "one token 60 times in a row" in err
    out = mdf(*argv)[1]
    assert "| loop (1) |" in out
    assert "Every drafted text equals the plain one." in out


def test_bench_refuses_a_file_without_prompts(mdf, pair, tmp_path):
    for text in ("", "{}\n", "[1]\n", "nothing\n"):
        (tmp_path / "p.jsonl").write_text(text)
        code, _, err = mdf("bench", *pair, "--prompts", tmp_path / "p.jsonl")
        assert code == 2
        assert "prompts" in err or "no prompt" in err


def test_tables_and_weights_are_foretold_as_they_are_held(mdf, pair):
    """What the plan counts is what lies there: every weight once, and the tables of angles."""
    memory = json.loads(mdf("info", *pair, "--json", "--ctx", 100)[1])["memory"]["bytes"]
    engine = md.load(pair[1], drafter=pair[3], ctx=100, backend="numba", warm=False)
    models = engine.target, engine.drafter
    tables = {id(table): table.nbytes for model in models for cos_sin in model.tables for table in cos_sin}
    assert memory["rope_tables"] == sum(tables.values())
    own = [w for model in models for part in (model.weights, *model.layers) for w in part.values()]
    views = [layer[name] for layer in engine.drafter.layers for name in ("kv", "k_norm")]  # counted already
    assert memory["weights"] == sum(w.nbytes for w in own) - sum(w.nbytes for w in views)


def test_info_opens_the_device_that_is_named(mdf, pair):
    code, _, err = mdf("info", *pair, "--backend", "numba", "--device", 3)
    assert code == 2 and "device 3" in err


def test_info_refuses_a_context_that_load_refuses(mdf, pair):
    assert (
        mdf("info", *pair, "--ctx", 4097)[0] == mdf("generate", "--tokens", "9", *pair, "--ctx", 4097)[0] == 2
    )


def test_target_and_drafter_have_revisions_of_their_own(monkeypatch):
    import minidflash.weights

    from minidflash.pair import open_pair

    asked, opened = [], minidflash.weights.open_checkpoint

    def watched(spec, role, revision=None, *rest):
        asked.append((role, revision))
        return opened(spec, role, None, *rest)

    monkeypatch.setattr(minidflash.weights, "open_checkpoint", watched)
    from tests.golden_files import golden

    open_pair(str(golden("llama-tiny")), str(golden("dflash-llama-tiny")), revision="a", drafter_revision="b")
    assert asked == [("target", "a"), ("drafter", "b")]
