"""Sizes of published models, in the table's letters: what `kernels --bench` and the benches time.

Sources: models.md 9, and dflash.md 2.2 for their drafters.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Drafter:
    """A DFlash drafter, as wide as its target. taps: the target's layers whose outputs it reads.
    block: as trained. window: keys that all layers but the last see; 0: all see all.
    """

    layers: int
    H: int
    G: int
    K: int
    F: int
    taps: tuple[int, ...]
    block: int = 16
    window: int = 0


@dataclass(frozen=True)
class Sizes:
    """A target. F: of one expert where there are E of them, of which a row uses U, stored as `experts`.

    window: keys that layers see but every `period`-th; 0: all see all. bias: in q, k, v and o. full: (G, K)
    of the layers that see all, where they differ. dense: width of an mlp beside the experts.
    """

    family: str
    layers: int
    D: int
    H: int
    G: int
    K: int
    F: int
    V: int
    tied: bool
    theta: float
    drafter: Drafter
    E: int = 0
    U: int = 0
    experts: str = ""
    window: int = 0
    bias: bool = False
    period: int = 2
    full: tuple[int, int] | None = None
    dense: int = 0

    @property
    def windows(self):
        """Keys that each layer sees; 0: all."""
        return tuple(0 if (i + 1) % self.period == 0 else self.window for i in range(self.layers))

    @property
    def dims(self):
        """The table's letters. L, layers, and C, the width of what it reads, are the drafter's."""
        found = {letter: getattr(self, letter) for letter in "DHGKFV"}
        found |= {"L": self.drafter.layers, "C": len(self.drafter.taps) * self.D}
        return found | ({"E": self.E, "U": self.U} if self.E else {})

    @property
    def products(self):
        """Row (linear_add's are o and down) -> (N, K) of its weight. Beside experts,
        the MLP is the drafter's."""
        D, heads, groups, d = self.D, self.H * self.K, self.G * self.K, self.drafter
        F = d.F if self.E else self.F
        return {
            "qkv": (heads + 2 * groups, D), "o": (D, heads), "gate_up": (2 * F, D), "down": (D, F),
            "head": (self.V, D), "fuse": (D, len(d.taps) * D), "inject": (d.layers * 2 * d.G * d.K, D),
        }  # fmt: skip


# family, layers, D, H, G, K, F, V, tied, theta; Drafter(layers, H, G, K, F, taps);
# E, U, experts, window, bias, and what else is named.
SIZES = {
    "smollm2-135m": Sizes("llama", 30, 576, 9, 3, 64, 1536, 49152, True, 1e5,
                          Drafter(5, 9, 3, 64, 1536, (1, 8, 14, 20, 27))),
    "qwen3-4b": Sizes("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True, 1e6,
                      Drafter(5, 32, 8, 128, 9728, (1, 9, 17, 25, 33))),
    "qwen3-8b": Sizes("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False, 1e6,
                      Drafter(5, 32, 8, 128, 12288, (1, 9, 17, 25, 33))),
    "llama-3.1-8b": Sizes("llama", 32, 4096, 32, 8, 128, 14336, 128256, False, 5e5,
                          Drafter(5, 32, 8, 128, 12288, (1, 8, 15, 22, 29), 10)),
    "qwen3-coder-30b-a3b": Sizes("qwen3_moe", 48, 2048, 32, 4, 128, 768, 151936, False, 1e7,
                                 Drafter(8, 32, 4, 128, 6144, (1, 12, 23, 34, 45)), 128, 8, "bf16"),
    "gpt-oss-20b": Sizes("gpt_oss", 24, 2880, 64, 8, 64, 2880, 201088, False, 1.5e5,
                         Drafter(8, 64, 8, 64, 7680, (1, 6, 11, 16, 21), 8), 32, 4, "mxfp4", 128, True),
    "gpt-oss-120b": Sizes("gpt_oss", 36, 2880, 64, 8, 64, 2880, 201088, False, 1.5e5,
                          Drafter(8, 64, 8, 64, 7680, (1, 9, 17, 25, 33), 10), 128, 4, "mxfp4", 128, True),
    "gemma-4-31b": Sizes("gemma4_text", 60, 5376, 32, 16, 256, 21504, 262144, True, 1e4,
                         Drafter(5, 64, 8, 128, 10752, (1, 12, 23, 35, 46, 57), window=2048),
                         window=1024, period=6, full=(4, 512)),
    "gemma-4-26b-a4b": Sizes("gemma4_text", 30, 2816, 16, 8, 256, 704, 262144, True, 1e4,
                             Drafter(5, 32, 8, 128, 5632, (1, 6, 11, 17, 22, 27), window=2048),
                             128, 8, "bf16", 1024, period=6, full=(2, 512), dense=2112),
    "toy": Sizes("qwen3", 4, 256, 8, 2, 64, 512, 1000, False, 1e6, Drafter(2, 8, 2, 64, 512, (1, 2))),
}  # fmt: skip
