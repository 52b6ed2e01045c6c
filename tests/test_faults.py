"""The lists of planted faults fit the code and cover it; the runner tells what is caught from what is not.

That the tests see each fault is shown by the runner itself (tests/faults/plant.py), which takes longer.
"""

import shlex
from pathlib import Path

import pytest
from minidflash.kernels.table import ROWS

from minidflash.cli import COMMANDS
from tests.faults import plant

ROOT = Path(__file__).resolve().parent.parent
FAULTS = plant.read()
LEAST = 60
# What minidflash promises and a fault could break: each has a fault that breaks "promise:
# ...", in these words.
PROMISES = """
drafted text is plain text at temperature 0
sampled text of a seed is the same with and without a drafter
the law of sampling is the filtered one
the law of rejection sampling is the target's
a draw belongs to seed, sample and position
the prefill chunk changes nothing
the verify length changes nothing
a row's bits depend on nothing beside it
a kernel waits for what it reads
ties go to the smallest id
golden tokens
golden acceptance
taps are their layers' outputs
drafts are made from the mask id
rope as the config says
windows
query heads share kv heads
norms have their eps
padding rows are never drawn
unknown tensors are refused
missing tensors are refused
weights are read as they are stored
unknown config keys are refused
config keys without a default are refused when missing
a pair that does not fit is refused
damaged files are refused
the default target is the file we know
a download fetches only what is needed
offline fetches nothing
stop ids
stop texts
budget
the end of the context is said at the call
memory is foretold
true shapes run no plain kernel
a slot goes back to its snapshot
a turn of a conversation is a fresh run
a served text is what generate gives alone
what a request does not mean is refused by its field's name
a client that leaves is not computed for
greedy drafts are ids that the target can choose
revisions of target and drafter are their own
statistics count what was verified
the trace tells the run
the json schema
exit codes
errors are one line
interrupts leave the engine usable
an engine runs one text at a time
streamed text is the whole text
text of a model with channels is the final one's
chat templates
a loop that is wrong is noticed under MINIDFLASH_CHECK
auto costs little where drafting does not pay
buffers are reused, not grown
caches are only caches
nothing heavy is imported
arguments of kernels are checked
wrappers become their instructions
files are short and read alike
""".strip().splitlines()


def test_there_are_enough_faults_and_each_can_be_planted():
    assert len(FAULTS) >= LEAST
    for fault in FAULTS:
        where = f"{fault.topic}.toml: {fault.name}"
        assert fault.old != fault.new, f"{where}: nothing changes"
        count = (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old)
        assert count == 1, f"{where}: `old` stands {count} times in {fault.file}, not once"


def test_the_tests_of_every_fault_are_there():
    for fault in FAULTS:
        words = [word.partition("::")[0] for word in shlex.split(fault.tests)]
        files = [word for word in words if word.startswith("tests/")]
        assert files, f"{fault.name} names no tests"
        assert not [f for f in files if not (ROOT / f).is_file()], f"{fault.name}: no file {files}"


BROKEN = {fault.breaks for fault in FAULTS}


@pytest.mark.parametrize("backend", ["oracle", "numba", "cuda"])
def test_every_row_has_a_fault_on_every_backend(backend):
    assert not [row for row in ROWS if f"row {row} {backend}" not in BROKEN]


def test_every_cuda_source_has_a_fault():
    planted = {fault.file for fault in FAULTS}
    sources = {f"kernels/cuda/{path.name}" for path in (ROOT / "kernels" / "cuda").iterdir()}
    assert not sources - planted


def test_every_command_and_every_promise_has_a_fault():
    assert not [name for name in COMMANDS if f"tool {name}" not in BROKEN]
    assert not [words for words in PROMISES if f"promise: {words}" not in BROKEN]


def test_what_is_broken_is_a_row_a_tool_or_a_promise():
    """A tool is a subcommand, or a file of the project that is run."""
    for words in BROKEN:
        kind, _, what = words.partition(" ")
        if kind == "row":
            name, _, backend = what.partition(" ")
            assert name in ROWS and backend in ("oracle", "numba", "cuda"), words
        else:
            assert kind == "promise:" or (kind == "tool" and (what in COMMANDS or (ROOT / what).is_file())), (
                words
            )


SOURCE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TESTS = """import code_of_it
import pytest


def test_double():
    assert code_of_it.double(2) == 4


def test_half():
    assert code_of_it.half(0) == 0


@pytest.mark.skip
def test_nothing():
    pass
"""


@pytest.fixture
def small(tmp_path):
    """A project of two functions, one of which is tested well: (its root, (old, new, tests) -> a fault)."""
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "code_of_it.py").write_text(SOURCE)
    (root / "tests" / "test_it.py").write_text(TESTS)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')

    def fault(name, old, new, test, **more):
        return plant.Fault(
            "small", name, "promise: it", "code_of_it.py", old, new, f"tests/test_it.py {test}", **more
        )

    return root, fault


def test_the_runner_tells_what_is_caught(small, tmp_path):
    root, fault = small
    faults = [
        fault("caught", "2 * x", "3 * x", "-k double"),
        fault("survived", "x / 2", "x / 3", "-k half"),
        fault("stale", "4 * x", "3 * x", "-k double"),
        fault("twice", "return", "return 0 *", "-k double"),
        fault("named", "2 * x", "3 * x", "-k double", says="assert 6 == 4"),
        fault("not-named", "2 * x", "3 * x", "-k double", says="assert 7 == 4"),
        fault("no-program", "2 * x", "2 * y", "-k double"),
        fault("no-program-is-meant", "2 * x", "2 * y", "-k double", compiles=False),
        fault("no-module", "def double(x):", "def double(x:", "-k double"),
        fault("no-test", "2 * x", "3 * x", "-k triple"),
        fault("skipped", "2 * x", "3 * x", "-k nothing"),
    ]
    said = []
    outcomes = plant.plant(faults, root, tmp_path / "copies", say=said.append)
    assert {out.name: out.status for out in outcomes} == {
        "caught": "caught", "survived": "survived", "stale": "stale", "twice": "stale",
        "named": "caught", "not-named": "survived", "no-program": "broken",
        "no-program-is-meant": "caught", "no-module": "broken", "no-test": "broken", "skipped": "broken",
    }  # fmt: skip
    assert outcomes[0].by.endswith("::test_double")
    assert [out.name for out in outcomes] == [f.name for f in faults]
    assert len(said) == len(faults)
    for place in (root, tmp_path / "copies" / "0" / "tree"):
        assert (place / "code_of_it.py").read_text() == SOURCE


def test_tests_that_fail_without_the_fault_say_nothing(small, tmp_path):
    root, fault = small
    (root / "code_of_it.py").write_text(SOURCE.replace("2 * x", "5 * x"))
    (out,) = plant.plant([fault("caught", "5 * x", "3 * x", "-k double")], root, tmp_path / "copies")
    assert out.status == "broken"
    assert "without the fault" in out.why


def test_an_entry_of_another_form_is_named(tmp_path):
    entry = '[[fault]]\nname = "a"\nbreaks = "tool info"\nfile = "f"\nold = "1"\nnew = "2"\ntests = "t"\n'
    (tmp_path / "one.toml").write_text(entry)
    assert [f.topic for f in plant.read(tmp_path)] == ["one"]
    (tmp_path / "two.toml").write_text(entry)
    with pytest.raises(ValueError, match="two faults a"):
        plant.read(tmp_path)
    (tmp_path / "two.toml").write_text(entry.replace("old", "olds"))
    with pytest.raises(ValueError, match=r"two.toml: a: .*olds"):
        plant.read(tmp_path)
