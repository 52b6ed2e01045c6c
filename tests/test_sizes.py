"""Sizes that a config or a flag claims: refused in one line before memory or time is spent on them."""

import time
import tracemalloc

import numpy as np
import pytest
from minidflash.kernels import open_ops

import minidflash as md
from minidflash import rope
from minidflash.errors import UserError
from tests import automaton
from tests.test_contract import edit


@pytest.mark.parametrize(
    ("which", "keys", "words"),
    [
        (0, {"num_hidden_layers": 5000}, "num_hidden_layers is 5000, need fewer: the files hold 39 tensors"),
        (0, {"num_hidden_layers": 10**7},
         "num_hidden_layers is 10000000, need fewer: the files hold 39 tensors"),
        (0, {"num_hidden_layers": 2**52}, "num_hidden_layers is 4503599627370496"),
        (1, {"num_hidden_layers": 10**8, "layer_types": None}, "num_hidden_layers is 100000000, need fewer"),
        (0, {"vocab_size": 2**52}, "vocab_size is 4503599627370496"),
        (0, {"vocab_size": 2**31 - 1}, "vocab_size is 64, the target's is 2147483647: not a pair"),
        (0, {"max_position_embeddings": 2**52}, "max_position_embeddings is 4503599627370496"),
        (1, {"block_size": 65}, "block_size is 65, need a whole number of at least 1, at most 64"),
        (1, {"block_size": 10**9}, "block_size is 1000000000"),
        (1, {"sliding_window": 2**32 + 4, "layer_types": ["sliding_attention"], "use_sliding_window": True},
         "sliding_window is 4294967300"),
        (1, {"dflash_config": {"mask_token_id": 10**4000, "target_layer_ids": [1]}}, "mask_token_id is 1000"),
    ],
)  # fmt: skip
def test_sizes_are_checked_before_memory_is_spent_on_them(tmp_path, which, keys, words):
    folders = automaton.build(tmp_path, "FX-B")
    edit(folders[which] / "config.json", **keys)
    tracemalloc.start()
    try:
        since = time.perf_counter()
        with pytest.raises(UserError) as refusal:
            md.load(str(folders[0]), drafter=str(folders[1]), backend="oracle", warm=False)
        assert words in str(refusal.value) and len(str(refusal.value)) < 250
        assert time.perf_counter() - since < 5 and tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_numbers_that_python_does_not_print_are_refused_in_one_line(tmp_path, mdf):
    target, drafter = automaton.build(tmp_path, "FX-B")
    usual = "generate", "--target", target, "--drafter", drafter, "--backend", "oracle"
    for size in (1000, 5000):
        number = "9" * size
        some = ["--tokens", "5"]
        for flags in (["--tokens", number], [*some, "-n", number], [*some, "--ctx", number],
                      [*some, "--temperature", "1", "--seed", number], [*some, "--block", number],
                      ):  # fmt: skip
            code, out, err = mdf(*usual, *flags)
            assert (code, out) == (2, "") and "internal" not in err and len(err) < 600, err


def test_rope_tables_are_the_same_in_pieces(monkeypatch):
    kind = open_ops("oracle"), rope.Rope(10000.0), 16, 100
    whole = rope.rope_tables(*kind)
    monkeypatch.setattr(rope, "PIECE", 7)
    for a, b in zip(whole, rope.rope_tables(*kind), strict=True):
        np.testing.assert_array_equal(a, b)
