"""quantization_config of FP8 checkpoints: e4m3 in blocks of 128 x 128, and which modules are left out.

Read completely or refused by the key. Source: models.md 11.
"""

import re
from dataclasses import dataclass
from functools import cached_property

KEY = "quantization_config"
LISTS = "modules_to_not_convert", "ignored_layers"
# Values that are built. What is stated must be so; the first two have no safe default.
BUILT = {
    "activation_scheme": "dynamic", "weight_block_size": [128, 128], "quant_method": "fp8", "fmt": "e4m3",
    "dequantize": False, "scale_fmt": "float",
}  # fmt: skip
NEEDED = "activation_scheme", "weight_block_size"
# What names of modules are made of, and a star: no pattern of these takes long to match.
MODULE, MOST_STARS = re.compile(r"[\w.*-]+"), 3


@dataclass(frozen=True)
class Fp8:
    """Weights of linear modules are FP8. skipped: patterns of those that are not."""

    skipped: tuple[str, ...] = ()

    @cached_property
    def _pattern(self):
        return re.compile("|".join(f"(?:{one})" for one in self.skipped))

    def skips(self, module):
        """Whether a module is left out, as transformers decides: a pattern matches where its name begins, or
        is how it ends."""
        return bool(self.skipped) and bool(self._pattern.match(module) or module.endswith(self.skipped))


def read_fp8(reader):
    """The Fp8 that a config.json states, None where it states no quantization_config.

    reader: config_keys.Reader. Errors: UserError naming the key. Source: models.md 11, and transformers'
    should_convert_module.
    """
    found = reader.value("fp8", KEY)
    if found is None:
        return None
    if not isinstance(found, dict) or found.get("quant_method") != BUILT["quant_method"]:
        method = found.get("quant_method") if isinstance(found, dict) else found
        reader.refuse(f"{KEY}.quant_method", method, "'fp8', or no quantization_config")
    for key in NEEDED:
        if found.get(key) is None:
            reader.missing(f"{KEY}.{key}")
    for key, value in found.items():
        if key in LISTS or value is None:
            continue
        if key not in BUILT:
            reader.refuse(f"{KEY}.{key}", value, "no such key: unknown here, it may change the algorithm")
        if value != BUILT[key] or isinstance(value, bool) != isinstance(BUILT[key], bool):
            reader.refuse(f"{KEY}.{key}", value, f"{BUILT[key]!r}: nothing else is built")
    lists = {key: _names(reader, key, found[key]) for key in LISTS if found.get(key) is not None}
    if len(set(lists.values())) > 1:
        reader.refuse(f"{KEY}.{LISTS[1]}", found[LISTS[1]], f"the same as {LISTS[0]}")
    return Fp8(next(iter(lists.values()), ()))


def _names(reader, key, found):
    """Patterns of modules."""
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        reader.refuse(f"{KEY}.{key}", found, "a list of modules' names")
    for one in found:
        if not MODULE.fullmatch(one) or one.startswith("*") or "**" in one or one.count("*") > MOST_STARS:
            reader.refuse(f"{KEY}.{key}", one, f"names of modules, of which each may have {MOST_STARS} stars")
    return tuple(found)
