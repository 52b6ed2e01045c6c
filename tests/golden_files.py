"""Where golden fixtures are found: the committed subset, MINIDFLASH_GOLDEN, or the checkout's neighbour."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLACES = [ROOT / "tests" / "golden", *map(Path, filter(None, [os.environ.get("MINIDFLASH_GOLDEN")])),
          ROOT.parent / "shared" / "golden"]  # fmt: skip


def golden(name):
    """Folder of one golden case; skips in words where the fixtures are absent (in CI every such skip
    fails)."""
    for place in PLACES:
        if (place / name / "golden.safetensors").is_file():
            return place / name
    pytest.skip(f"golden fixture {name} is not here: set MINIDFLASH_GOLDEN")
