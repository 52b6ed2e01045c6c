"""propose and reject: drafts drawn from the drafter's law, kept by rejection sampling;
what comes out has the target's law."""

import numpy as np
import pytest

from tests.cases import JUNK, Make, run, truth
from tests.chance import filtered, surprise
from tests.conftest import FULL, parameters
from tests.fast_rows import fast_run
from tests.kernels.test_sample import (
    BARE,
    CURVES,
    EPS,
    FILTERS,
    agree,
    bent,
    of_logits,
    on_exact_laws,
    on_exact_logits,
)

LAWS = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}]


def keys(slots, seed=5, number=0, top_k=0):
    """Every slot is a sample of its own."""
    rows = [[seed & 0xFFFFFFFF, seed >> 32, number + n, top_k] for n in range(slots)]
    return np.array(rows, np.uint32).view(np.int32)


def asked(case, slots, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **key):
    law = np.array([[temperature, top_p, min_p]] * slots, np.float32)
    return case | {"key": keys(slots, top_k=top_k, **key), "law": law}


def proposal(ops, logits, slots, block, start=3, **law):
    """A case of propose: `slots` blocks at `start`, every row with these logits; columns 1.. are drafted."""
    case = of_logits(ops, logits, slots * block)
    rows = np.arange(slots * block, dtype=np.int32)
    case |= {"slot": rows // block, "pos": start + rows % block, "pick": rows[rows % block > 0]}
    case["mass"] = np.full((slots * block, len(logits)), np.nan, np.float32)
    del case["logprob"]
    return asked(case, slots, **law)


def decision(ops, logits, slots, width, drafts, mass, start=3, **law):
    """A case of reject on the same slots: every row has these logits."""
    case = of_logits(ops, logits, slots * width)
    case["pos"] = start + np.arange(slots * width, dtype=np.int32) % width
    block = drafts.size // slots
    case |= {"drafts": drafts.reshape(slots, block), "mass": mass.reshape(slots, block, -1)}
    del case["pick"], case["slot"]
    return asked(case, slots, **law)


def rounds(ops, p, q, slots, width, run=run, **law):
    """(drafts, choices), each (slots, width), of one round in every slot."""
    drafted = run(ops, "propose", proposal(ops, q, slots, width, **law))
    case = decision(ops, p, slots, width, drafted["ids"], drafted["mass"], **law)
    return drafted["ids"].reshape(slots, width), run(ops, "reject", case)["ids"].reshape(slots, width)


def random_case(ops, rng, slots, width, block, D, V, limit=None, **law):
    """Rows that differ, a slot that is done, drafts from the oracle."""
    make, limit = Make(rng, ops.activations), limit or V
    T = slots * block
    shared = {"norm": make.v(D, around=1), "eps": EPS, "w": make.w(V, D), "limit": limit, **BARE}
    rows = np.arange(T, dtype=np.int32)
    case = {
        "x": make.a(T, D), "pick": rows[rows % block > 0], "slot": rows // block, "pos": 40 + rows % block,
        **shared, "ids": np.full(T, JUNK["i32"], np.int32), "mass": np.full((T, V), 7, np.float32),
    }  # fmt: skip
    case = asked(case, slots, **law)
    drafted = truth("propose", case)
    where = 40 + np.arange(slots * width, dtype=np.int32) % width
    where[(slots - 1) * width :] = -1 if slots > 2 else where[(slots - 1) * width :]
    return case, asked(
        {
            "x": make.a(slots * width, D), "pos": where, **shared,
            "drafts": drafted["ids"].reshape(slots, block),
            "mass": drafted["mass"].reshape(slots, block, V).astype(np.float32),
            "ids": np.full(slots * width, JUNK["i32"], np.int32),
            "logprob": np.full((slots * width, 2), 7, np.float32),
        }, slots, **law,
    )  # fmt: skip


@pytest.mark.parametrize("law", FILTERS, ids=str)
@pytest.mark.parametrize("slots, width, block, D, V, limit",
                         [(3, 4, 5, 40, 77, 70), (1, 16, 16, 24, 700, 700), (4, 1, 1, 8, 9, 9)])  # fmt: skip
def test_both_match_the_oracle(ops, rng, slots, width, block, D, V, limit, law):
    temperatures = 0.3, 1.0, 1.7, 50.0
    if ops.name == "emulate" and not FULL:  # half by turns: every law and every shape has all four
        temperatures = temperatures[(FILTERS.index(law) + slots) % 2 :: 2]
    for temperature in temperatures:
        first, second = random_case(
            ops, rng, slots, width, block, D, V, limit, temperature=temperature, **law
        )
        got, want = run(ops, "propose", first), truth("propose", first)
        assert got["ids"].tolist() == want["ids"].tolist()
        np.testing.assert_allclose(got["mass"], want["mass"], rtol=2e-5, atol=1)
        agree(run(ops, "reject", second), truth("reject", second), (temperature, law))


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_both_draw_from_capped_logits(ops, rng, curve):
    for law in LAWS:
        first, second = (bent(case, curve) for case in random_case(ops, rng, 3, 4, 5, 40, 77, 70, **law))
        got, want = run(ops, "propose", first), truth("propose", first)
        assert got["ids"].tolist() == want["ids"].tolist()
        np.testing.assert_allclose(got["mass"], want["mass"], rtol=2e-5, atol=1)
        agree(run(ops, "reject", second), truth("reject", second), law)


SHAPES = "normal", "flat", "ties", "peak"
MANY = {}, {"top_p": 0.9}, {"top_k": 50, "min_p": 0.01}


@pytest.mark.parametrize("shape, law, ops", [
    pytest.param(shape, law, p.values[0], id=f"{shape}-{law}-{p.id}", marks=p.marks)
    for s, shape in enumerate(SHAPES) for i, law in enumerate(MANY) for p in parameters(activations=["f32"])
    if FULL or p.values[0][0] != "emulate" or (s + i) % 2 == 0  # of every shape, and with every law
], indirect=["ops"])  # fmt: skip
def test_a_row_of_many_ids_is_shared_by_blocks(ops, rng, shape, law):
    """Above 16,384 logits a cluster of eight takes a row; sample, propose and reject alike."""
    V = 20011
    of = {"normal": rng.standard_normal(V) * 2, "flat": np.full(V, 1.5), "ties": rng.integers(0, 9, V) / 3.0,
          "peak": rng.standard_normal(V) * 9}  # fmt: skip
    case = of_logits(ops, of[shape], 3, temperature=0.7, **law)
    agree(run(ops, "sample", case), truth("sample", case), law)
    first = proposal(ops, of["normal"], 1, 3, temperature=0.7, **law)
    drafted, want = run(ops, "propose", first), truth("propose", first)
    assert drafted["ids"].tolist() == want["ids"].tolist()
    case = decision(
        ops, of[shape], 1, 3, want["ids"], want["mass"].astype(np.float32), temperature=0.7, **law
    )
    agree(run(ops, "reject", case), truth("reject", case), law)


def alike(seed, count=12):
    """Logits of a target, and of a drafter that is roughly right."""
    p, other = np.random.default_rng(seed).standard_normal((2, count)) * 1.5
    return p, p * 0.8 + other * 0.4


@on_exact_laws(LAWS)
def test_what_comes_out_has_the_targets_law(ops, temperature, law):
    """Two ids a slot: the draft or what took its place, and where it stayed, the draw behind it."""
    p, q = alike(4)
    counts, drafted, both, kept = np.zeros(12), np.zeros(12), np.zeros((12, 12)), 0
    for seed in range(2 if ops.name in ("oracle", "emulate") else 8):
        drafts, ids = rounds(ops, p, q, 256, 2, temperature=temperature, seed=seed, **law)
        counts += np.bincount(ids[:, 0], minlength=12)
        drafted += np.bincount(drafts[:, 1], minlength=12)
        stays = ids[:, 0] == drafts[:, 1]
        np.add.at(both, (ids[stays, 0], ids[stays, 1]), 1)
        kept += stays.sum()
    p, q = (filtered(z, temperature, **law) for z in (p, q))
    assert surprise(counts, p) < 4.5 and surprise(drafted, q) < 4.5
    share = np.minimum(p, q)
    total, count = share.sum(), counts.sum()
    assert abs(kept - total * count) < 4.5 * np.sqrt(total * (1 - total) * count) + 1e-9
    if kept > 50:
        assert surprise(both, np.outer(share / total, p)) < 4.5


@pytest.mark.parametrize("ops", parameters(["oracle", "numba"], ["f32"]), indirect=True)
def test_drafts_of_another_law_than_claimed_are_seen(ops):
    """The drafter's likeliest id, kept as if it had been drawn from the drafter's law: the usual mistake."""
    p, q = alike(4)
    drafted = run(ops, "propose", proposal(ops, q, 256, 2))
    counts = np.zeros((2, 12))
    for likeliest in (0, 1):
        ids = np.full_like(drafted["ids"], q.argmax()) if likeliest else drafted["ids"]
        found = run(ops, "reject", decision(ops, p, 256, 2, ids, drafted["mass"]))["ids"]
        counts[likeliest] = np.bincount(found[::2], minlength=12)
    assert surprise(counts[0], filtered(p)) < 4.5 and surprise(counts[1], filtered(p)) > 6


def test_equal_laws_keep_every_draft_and_disjoint_ones_none(ops):
    z = np.random.default_rng(2).standard_normal(30)
    drafts, ids = rounds(ops, z, z, 16, 6)
    assert (ids[:, :-1] == drafts[:, 1:]).all()
    far = np.where(np.arange(30) < 15, z, -1e4)
    drafts, ids = rounds(ops, far, -1e4 - far, 16, 6)
    assert (drafts[:, 1:] >= 15).all() and (ids < 15).all()
    one = np.where(np.arange(30) == 4, 50.0, 0.0)
    drafts, ids = rounds(ops, one, z, 16, 6, temperature=0.5)
    assert (ids == 4).all(), "what is drawn in a draft's place is never the draft"


@on_exact_logits
def test_one_random_number_says_nothing_about_another(ops):
    """Of one seed, sample and position: the draft, what replaces it, the draw without a draft;
    and of neighbours."""
    flat, slots = np.zeros(8), 512
    draft, _ = rounds(ops, flat, flat, slots, 3)
    behind = np.zeros((slots, 3, 8), np.float32)
    behind[:, :, 0] = 1  # every draft is 0, and 7 of 8 are replaced
    case = decision(ops, flat, slots, 3, np.zeros((slots, 3), np.int32), behind, start=2)
    replaced = run(ops, "reject", case)["ids"].reshape(slots, 3)
    case = decision(ops, flat, slots * 3, 1, np.zeros((slots * 3, 1), np.int32),
                    np.ones((slots * 3, 1, 8), np.float32))  # fmt: skip
    case["key"] = np.repeat(keys(slots), 3, axis=0)
    case["pos"] = np.tile(np.arange(2, 5, dtype=np.int32), slots)
    drawn = run(ops, "reject", case)["ids"].reshape(slots, 3)
    assert surprise(np.bincount(drawn.ravel(), minlength=8), np.full(8, 1 / 8)) < 4.5
    share = np.append(1 / 8, np.full(7, 1 / 8))
    pairs = [(draft[:, 1], drawn[:, 1]), (draft[:, 2], drawn[:, 2]), (draft[:, 1], draft[:, 2]),
             (replaced[:, 0], draft[:, 1]), (replaced[:, 0], drawn[:, 0]), (replaced[:, 0], replaced[:, 1]),
             (replaced[:, 1], drawn[:, 1]), (drawn[:, 0], drawn[:, 1])]  # fmt: skip
    for one, other in pairs:
        counts = np.zeros((8, 8))
        np.add.at(counts, (one, other), 1)
        assert surprise(counts, np.outer(share, share)) < 4.5


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 9e-6])
def test_near_temperature_zero_both_name_the_likeliest(ops, rng, temperature):
    first, second = random_case(ops, rng, 3, 4, 4, 40, 300, temperature=temperature, top_p=0.5)
    drafted, found = run(ops, "propose", first), run(ops, "reject", second)
    heads = ("x", "pick", "norm", "eps", "w", "limit", "ids")
    assert drafted["ids"].tolist() == run(ops, "head", {name: first[name] for name in heads})["ids"].tolist()
    assert (drafted["mass"].max(1)[first["pick"]] == 2**43).all() and (
        (drafted["mass"] > 0).sum(1)[first["pick"]] == 1
    ).all()
    second |= {"pick": np.flatnonzero(second["pos"] >= 0).astype(np.int32)}
    assert found["ids"].tolist() == run(ops, "head", {name: second[name] for name in heads})["ids"].tolist()


@pytest.mark.parametrize("temperature", [1e-9, 1e-6, 1e-5, 1e-4, 50.0, 3e38])
def test_extremes_give_no_nan(ops, temperature):
    logits = [-np.inf, 1e38, -1e38, 0, 1e-40, -1e-40, np.nan, 2.5, 2.5]
    for p in (logits, [0.0] * 9, [np.nan] * 9, [np.inf, 3.0, np.inf, *[0.0] * 6], [-np.inf] * 8 + [4.0]):
        for q in (logits, [0.0] * 9, [np.nan] * 9):
            law = {"temperature": temperature}
            drafted = run(ops, "propose", proposal(ops, q, 2, 3, **law))
            picked = drafted["mass"].reshape(2, 3, 9)[:, 1:]
            assert np.isfinite(picked).all() and (picked.sum(-1) >= 2**43).all()
            case = decision(ops, p, 2, 3, drafted["ids"], drafted["mass"], **law)
            got = run(ops, "reject", case)
            agree(got, truth("reject", case), (p, q))
            assert (got["ids"] == -1).all() == (not np.isfinite(p).all()), p
            assert np.isfinite(q).all() or (drafted["ids"].reshape(2, 3)[:, 1:] == 0).all(), q


@pytest.mark.parametrize("ops", parameters(["numba", "emulate", "cuda"]), indirect=True)
def test_a_row_depends_on_nothing_beside_it(ops, rng):
    """Not on the rows verified, the slots, what they hold, nor on whether log-probabilities are wanted."""
    _, case = random_case(ops, rng, 4, 8, 8, 40, 77, temperature=1.2, top_p=0.95)
    whole = run(ops, "reject", case)
    assert run(ops, "reject", case | {"logprob": None})["ids"].tolist() == whole["ids"].tolist()
    for slots, width in ((1, 8), (2, 5), (3, 2)):
        rows = (np.arange(slots)[:, None] * 8 + np.arange(width)).ravel()
        part = {name: case[name][:slots] for name in ("key", "law", "drafts", "mass")}
        part |= {name: np.ascontiguousarray(case[name][rows]) for name in ("x", "pos", "ids", "logprob")}
        got = run(ops, "reject", case | part)
        inner = np.arange(slots * width) % width < width - 1  # the last of a slot has no draft to decide on
        inner |= width == 8
        for name in ("ids", "logprob"):
            assert got[name][inner].tobytes() == np.ascontiguousarray(whole[name][rows][inner]).tobytes()
    bad = case | {"x": case["x"].copy()}
    bad["x"][1::2] = 0x7FC0 if ops.activations == "bf16" else np.nan
    assert run(ops, "reject", bad)["ids"][0:24:2].tolist() == whole["ids"][0:24:2].tolist()


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
def test_the_fast_variant_decides_from_its_own_logits(ops, rng):
    first, second = random_case(ops, rng, 3, 8, 8, 64, 700, temperature=0.9, top_p=0.95)

    def logits(case):
        return fast_run(ops, "head_logits", {n: case[n] for n in ("x", "norm", "eps", "w", *BARE)})["logits"]

    got, exact = fast_run(ops, "propose", first), logits(first)
    for r in first["pick"]:
        one = proposal(ops, exact[r], 1, 2, start=int(first["pos"][r]) - 1, temperature=0.9, top_p=0.95)
        one["key"] = first["key"][r // 8][None]
        want = truth("propose", one)
        assert want["ids"][1] == got["ids"][r]
        np.testing.assert_allclose(got["mass"][r], want["mass"][1], rtol=2e-5, atol=1)
    got, exact = fast_run(ops, "reject", second), logits(second)
    for r in np.flatnonzero(second["pos"] >= 0):
        n, i = divmod(int(r), 8)
        width = 1 if i == 7 else 2
        drafts, mass = second["drafts"][n : n + 1, i : i + width], second["mass"][n : n + 1, i : i + width]
        one = decision(
            ops,
            exact[r],
            1,
            width,
            drafts,
            mass,
            start=int(second["pos"][r]),
            temperature=0.9,
            top_p=0.95,
        )
        one["key"] = second["key"][n][None]
        want = truth("reject", one)
        assert want["ids"][0] == got["ids"][r]
        np.testing.assert_allclose(got["logprob"][r], want["logprob"][0], rtol=2e-5, atol=2e-5)


def test_every_slot_has_its_own_law_and_key(ops, rng):
    """Slots of a pass may ask for different things: each row is drawn, drafted and kept by its slot's own."""
    laws = np.float32([[0.0, 1.0, 0.0], [1.3, 0.6, 0.0], [0.7, 1.0, 0.1]])
    keys = np.array([[5, 0, 0, 0], [5, 7, 1, 0], [9, 0, 2, 3]], np.int32)
    propose, reject = random_case(ops, rng, 3, 3, 4, 24, 90)
    sample = {
        name: propose[name]
        for name in ("x", "pick", "slot", "pos", "norm", "eps", "w", "limit", "ids", *BARE)
    }
    sample["logprob"] = np.full((12, 2), 7, np.float32)
    for name, case in (("propose", propose), ("reject", reject), ("sample", sample)):
        case |= {"law": laws, "key": keys}
        got, want = run(ops, name, case), truth(name, case)
        assert got["ids"].tolist() == want["ids"].tolist(), name
