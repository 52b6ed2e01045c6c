"""What CI means: its script says that it is CI, and there a test that skips fails, unless it needs a GPU."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = 'bash -c "$tests" | tee "$told"'
TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.gpu
def test_needs_a_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail(strict=True)
def test_is_known_to_fail():
    assert False
"""
SKIPS = {  # where -> a file of tests
    "in_a_test": "import pytest\n\ndef test_it():\n    pytest.skip('no tool here')\n",
    "in_a_fixture": "import pytest\n\n@pytest.fixture\ndef tool():\n    pytest.skip('no tool here')\n\ndef "
                    "test_it(tool):\n    pass\n",
    "by_a_mark": "import pytest\n\n@pytest.mark.skipif(True, "
                 "reason='no tool here')\ndef test_it():\n    pass\n",
    "of_a_file": "import pytest\n\npytest.skip('no tool here', allow_module_level=True)\n",
}  # fmt: skip


def run(folder, ci):
    """(exit code, output) of pytest over a folder of its own, with this project's conftest."""
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])} | (
        {"CI": "true"} if ci else {}
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        str(folder),
    ]
    done = subprocess.run(command, check=False, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_gpu_tests_may_skip_and_known_failures_fail(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    code, out = run(tmp_path, ci=True)
    assert code == 0 and re.search(r"1 passed, 1 skipped, 1 xfailed", out), out


def test_a_skip_fails_in_ci_and_only_there(tmp_path):
    words = "where only tests marked gpu may be: Skipped: no tool here"
    (tmp_path / "test_some.py").write_text(TESTS)
    *tests, whole = SKIPS
    for where in tests:
        (tmp_path / f"test_{where}.py").write_text(SKIPS[where])
    code, out = run(tmp_path, ci=True)
    assert code != 0 and out.count(words) >= len(tests), out
    assert all(re.search(rf"(FAILED|ERROR) \S*test_{where}\.py", out) for where in tests), out
    (tmp_path / f"test_{whole}.py").write_text(SKIPS[whole])
    code, out = run(tmp_path, ci=True)  # it ends the collection of all
    assert code != 0 and words in out and re.search(rf"ERROR \S*test_{whole}\.py", out), out
    code, out = run(tmp_path, ci=False)
    assert code == 0 and f"{len(SKIPS) + 1} skipped" in out, out


def test_the_script_says_that_it_is_ci_before_its_tests():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    exports = [n for n, line in enumerate(lines) if line.split("#")[0].strip() == "export CI=true"]
    assert exports and exports[0] < lines.index(RUN)


def test_the_script_ends_with_lines_of_code_and_pytest_s_closing_line(tmp_path):
    """Its last part, with tests of our own in a folder of our own; where they fail it ends there."""
    script = (ROOT / ".ci" / "run").read_text()
    assert script.count(RUN) == 1 and "set -euo pipefail" in script
    last = script[script.index("told=") :]
    (tmp_path / ".ci").symlink_to(ROOT / ".ci")
    (tmp_path / "a.py").write_text("1\n2\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.cu").write_text("1\n2\n3\n")
    (tmp_path / "b" / "not code.txt").write_text("1\n")
    for words in (["init", "-q"], ["add", "a.py", "b"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "untracked.py").write_text("1\n")

    def ended(tests):
        command = ["bash", "-c", f"set -euo pipefail\ntests={shlex.quote(tests)}\n{last}"]
        done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, [" ".join(line.split()) for line in done.stdout.splitlines()]

    table = ["== lines of code", ". 2", "b 3", "in all 5"]
    assert ended("echo begun; echo 7 passed") == (0, ["begun", "7 passed", *table, "7 passed"])
    assert ended("echo 1 failed; exit 3") == (3, ["1 failed"])
