"""What a cubin's machine code is, by nvdisasm, and whether it holds the instructions that it should."""

import re
import struct
import subprocess
from importlib import util
from pathlib import Path

import pytest
from minidflash.kernels.compiler import ARCHES

from tests.conftest import FULL

SM90, *SM100 = ARCHES.values()


def cards(turn):
    """The cards that a .cu is compiled for: sm_90a, and by turns one of the two others, which no source tells
    apart (test_compile); all with MINIDFLASH_FULL=1."""
    return [SM90, *SM100] if FULL else [SM90, SM100[turn % len(SM100)]]


def nvdisasm():
    """The path of nvdisasm from its wheel, or a skip."""
    roots = util.find_spec("nvidia").submodule_search_locations if util.find_spec("nvidia") else ()
    for root in roots:
        for tool in Path(root).glob("*/bin/nvdisasm"):
            return tool
    return pytest.skip("nvdisasm is not installed (wheel nvidia-cuda-nvdisasm)")


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;")


def disassemble(cubin, tmp_path):
    """{kernel: list of instructions, "LDG.E.128 ...", predicates dropped} of a cubin."""
    return disassemble_all([cubin], tmp_path)[0]


def disassemble_all(cubins, tmp_path):
    """`disassemble` of cubins for one card, in one call of nvdisasm, most of whose second is its start."""
    (card,) = {cubin[0x31] for cubin in cubins}  # of the ELF's flags: 90, 100, 103
    pieces = [(n, name, code) for n, cubin in enumerate(cubins) for name, code in _codes(cubin).items()]
    file = tmp_path / "kernels.bin"
    file.write_bytes(b"".join(code for *_, code in pieces))
    command = [nvdisasm(), "-ndf", "-b", f"SM{card}a", file]
    lines = _LINE.findall(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [int(at, 16) for at, _ in lines] == list(range(0, file.stat().st_size, 16)), "one every 16 bytes"
    found, at = [{} for _ in cubins], 0
    for n, name, code in pieces:
        found[n][name] = [line for _, line in lines[at : at + len(code) // 16]]
        at += len(code) // 16
    return found


def _codes(cubin):
    """{kernel: its machine code}: the sections .text.NAME of an ELF file of 64 bits."""
    (start,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    heads = [struct.unpack_from("<2I4Q", cubin, start + i * size) for i in range(count)]
    found = {}
    for name, _, _, _, offset, length in heads:
        at = heads[names][4] + name
        name = cubin[at : cubin.index(0, at)].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = cubin[offset : offset + length]
    assert found, "no machine code"
    return found


def leave_first(instructions):
    """Whether a kernel's bulk copies have a policy for L2, by which their bytes leave it first.
    The set of what is found: empty without copies."""
    return {"desc[" in line for line in instructions if line.startswith("UBLKCP")}


def assert_instructions(instructions, wanted, unwanted=("LDL", "STL")):
    """Each of `wanted` starts an instruction, none of `unwanted` does.

    instructions: one kernel's list from disassemble. wanted: opcodes as "HMMA" or "LDG.E"; a modifier written
    after a space, "LDG.E 128", must follow somewhere in the same opcode.
    """

    def has(pattern):
        start, *modifiers = pattern.split(" ")
        opcodes = (line.split(" ")[0] for line in instructions)
        return any(
            (op == start or op.startswith(start + ".")) and all(m in op.split(".") for m in modifiers)
            for op in opcodes
        )

    missing = [pattern for pattern in wanted if not has(pattern)]
    assert not missing, f"missing {missing} among {sorted({line.split(' ')[0] for line in instructions})}"
    present = [pattern for pattern in unwanted if has(pattern)]
    assert not present, f"unwanted {present}"
