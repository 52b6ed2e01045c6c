"""What README and bench/MEASURED.md claim: computed from clean results, each with its source,
and nothing beside them."""

import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from minidflash import sampling

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?![\w-])")


@pytest.fixture
def said(bench, tmp_path):
    """change(name, found) of every result -> (text of both documents, what was left out)."""

    def say(change):
        for path in (BENCH / "results").glob("*.json"):
            found = json.loads(path.read_text())
            change(path.stem, found)
            (tmp_path / path.name).write_text(json.dumps(found))
        results = bench("quote").Results(tmp_path)
        report = bench("report")
        text = "\n".join([*report.measured(results), *report.summary(results)])
        return text, results.left_out

    return say


def as_they_are(name, found):
    pass


def only(wanted, **changes):
    """A change of one result's first level."""
    return lambda name, found: found.update(changes if name == wanted else {})


def line_of(text, part):
    """The line that names a result's file."""
    return next(line for line in text.splitlines() if f"bench/results/{part}.json" in line)


def test_documents_are_what_the_results_say():
    command = [sys.executable, str(BENCH / "report.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_number_is_noticed(bench, monkeypatch, capsys, tmp_path):
    report = bench("report")
    stale = tmp_path / "README.md"
    stale.write_text(report.README.read_text().replace("times plain; tau", "times plain; tau 9"))
    for name, value in {"README": stale, "ROOT": tmp_path}.items():
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    assert report.main() == 1
    assert "README.md is not what the results say: python bench/report.py --write" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["report.py", "--write"])
    assert report.main() == 0
    assert stale.read_text() == (ROOT / "README.md").read_text()


# Of a result: what benches were set to, not what they measured.
SETTINGS = {
    "settings", "context", "rows", "heads", "outputs", "cols", "verify", "law", "threads", "piece_mb",
    "repeat",
    "cores", "date", "commit", "command", "versions", "dflash", "card", "processor", "compute_sanitizer",
    "on", "words",
    "failures", "max_tokens", "model", "row", "kind", "kernel", "shape", "cut",
    "width", "concurrency", "slowest_percent", "least_texts", "accept", "connections",
}  # fmt: skip
# Written in bench/measured.py: rows and laws of the parts of a round, contexts that are looked up.
LITERALS = {"0", "1", "4", "8", "16", "0.7", "0.9", "50", "2048"}


def walk(value, key=None):
    """(key, value) of everything in a result; what is in a list has the list's key."""
    yield key, value
    inside = (
        value.items()
        if isinstance(value, dict)
        else [(key, v) for v in value]
        if isinstance(value, list)
        else []
    )
    for k, v in inside:
        yield from walk(v, k)


def doctored(value, seed, *path):
    """The same with every measured number another one, each place's in its own way,
    so that ratios change too."""
    if isinstance(value, dict):
        return {k: v if k == "settings" else doctored(v, seed, *path, k) for k, v in value.items()}
    if isinstance(value, list):
        return [doctored(v, seed, *path) for v in value]
    if path[-1] in SETTINGS or isinstance(value, bool):
        return value
    factor = 1.5 + zlib.crc32(f"{path}{seed}".encode()) % 97 / 20
    if isinstance(value, int):
        return round(value * factor) + 7
    return value * factor + 0.3 if isinstance(value, float) else value


def numbers(text):
    """(number, what stands before it) of all numbers of a text, without what is code."""
    text = re.sub(r"`[^`]*`", "", text)
    return [
        (found[0].replace(",", ""), text[max(0, found.start() - 90) : found.end()])
        for found in NUMBER.finditer(text)
    ]


def test_no_measured_number_is_a_constant(said):
    """Where all results are others, all numbers are others, but for settings and for the lengths of lists."""
    given = set(LITERALS)

    def settings(name, found):
        for key, value in walk(found):
            if isinstance(value, (dict, list)):
                given.add(str(len(value) - (key == "parts")))  # one is the planted mistake's
            elif key in SETTINGS or isinstance(value, str):
                given.update(re.findall(r"\d+(?:\.\d+)?", str(value)))

    before = numbers(said(settings)[0])
    assert len(before) > 1000
    constant = set(range(len(before)))
    for seed in range(4):  # since a rounded ratio may come out the same once
        after = numbers(said(lambda name, found, seed=seed: found.update(doctored(found, seed)))[0])
        assert len(after) == len(before)
        constant &= {i for i, (one, two) in enumerate(zip(before, after, strict=True)) if one[0] == two[0]}
    constant = [before[i] for i in sorted(constant) if before[i][0] not in given]
    assert not constant, "\n".join(f"{number}: ...{words}" for number, words in constant)


def test_every_section_names_file_commit_date_and_command(said):
    text, _ = said(as_they_are)
    whole, short = text.split("\n## ", 1)[1].split("\n| measured |")
    parts = [" ".join(part.split()) for part in re.split(r"\n### ", whole)[1:]]
    rows = [line for line in short.splitlines() if line.startswith("|") and "---" not in line][1:]
    assert len(parts) > 25 and len(rows) > 3
    for part in parts + rows:
        is_row = part in rows  # of README, which leads to the whole
        named = re.findall(r"`([\w-]+)`: " if is_row else r"`bench/results/([\w.-]+)\.json`", part)
        assert named, part[:200]
        for name in named:
            found = json.loads((BENCH / "results" / f"{name}.json").read_text())
            head = f"{found['commit']}, {found['date']}"
            assert (f"`{name}`: {head}" if is_row else f".json`: {head}, `{found['command']}`") in part


@pytest.mark.parametrize("changes, why", [
    ({"commit": "1234567+changes"}, "measured on a tree with changes (1234567+changes)"),
    ({"commit": None}, "does not say its commit"), ({"date": ""}, "does not say its date"),
    ({"command": None}, "does not say its command"), ({"machine": None}, "does not say its machine"),
])  # fmt: skip
def test_a_result_is_quoted_only_of_a_clean_tree_and_with_its_head(said, changes, why):
    """Round h100 is quoted in its own section and beside its peers', and in the README."""
    text, left_out = said(as_they_are)
    assert (text.count("results/round-h100.json"), text.count("`round-h100`: ")) == (2, 1)
    text, left_out = said(only("round-h100", **changes))
    assert "round-h100.json" not in text and "`round-h100`: " not in text and f"round-h100: {why}" in left_out
    assert "results/round-h200.json" in text and "results/embedded-h100.json" in text


def test_what_nothing_was_measured_of_is_left_out(said):
    for name, changes in {
        "lossless-embedded-h200": {"runs": 0}, "kernels-nvidia-h200": {"results": []},
        "round-h200": {"card": "NVIDIA H100"},
        "soak-cpu": {"match": {"grown_mib": 0, "rounds": 0, "texts": 0, "tokens": 0, "out_of_range": 0}},
    }.items():  # fmt: skip
        text, left_out = said(only(name, **changes))
        assert f"results/{name}.json" not in text and len(left_out) == len(said(as_they_are)[1]) + 1


def doctored_verdicts():
    """name of the case -> (result, what is changed in it, words without it, words with it)."""

    def differing(found):
        found["differing"] = 1

    def short(found):
        found["accepted_at_block_16_replay"]["15"] = 0

    def block(found):
        found["qwen3-8b"]["lossless"]["block_8"]["is_same"] = False

    def length(found):
        found["qwen3-8b"]["lossless"]["block_4"]["accepted"]["3"] = 0

    def dirty(found):
        found["checks"]["memcheck"]["parts"]["head"].update(is_clean=False, words="2 errors")

    def not_found(found):
        found["checks"]["racecheck"]["parts"]["planted"]["is_clean"] = False

    def unlike(found):
        found["qwen3-8b"]["is_same"] = False

    def prompt(found):
        found["prompts"][0]["is_lossless"] = False

    def wrong(found):
        found["pair f32"]["wrong"] = ["prompt 0 block 4: ids"]

    def failed(found):
        found["golden"].update(passed=75, failed=1, failures=["a | b"])

    def outside(found):
        found["reject"]["out_of_range"] = 3

    return {
        "drafted": ("lossless-embedded-h100", differing, "0 of 300", "1 of 300"),
        "sampled": ("lossless-sampled-h200", differing, "0 of 100 |", "1 of 100 |"),
        "lengths": ("lossless-sampled-h200", short, "| 16 of 16 |", "| 15 of 16 |"),
        "true shape": ("round-h200", block, "3 of 3 gave the plain ids", "2 of 3 gave the plain ids"),
        "its lengths": ("round-h200", length, "28 of 28 accepted", "27 of 28 accepted"),
        "sanitizer": ("sanitizer-h200", dirty, "| memcheck | 21 of 21 |", "| memcheck | 20 of 21 |"),
        "what is not clean": ("sanitizer-h200", dirty, "| found |  |", "| found | head: 2 errors |"),
        "planted": ("sanitizer-h200", not_found, "| racecheck | 21 of 21 | 161 | found",
                    "| racecheck | 21 of 21 | 161 | NOT found"),
        "loops": ("loops-h200", unlike, "2 of 2 shapes gave", "1 of 2 shapes gave"),
        "prompts": ("cpu", prompt, "12 of 12 prompts gave", "11 of 12 prompts gave"),
        "golden pair": ("gpu-check-pair-h200", wrong, "pair f32: 0 of 18 runs wrong",
                        "pair f32: 1 of 18 runs wrong"),
        "tests": ("gpu-check-kernels-h100", failed, "| golden | 76 | 0 | 0 |  |",
                  r"| golden | 75 | 1 | 0 | `a \| b` |"),
        "ids": ("soak-cpu", outside, "| 0 of 19,500 |", "| 3 of 19,500 |"),
    }  # fmt: skip


@pytest.mark.parametrize("case", doctored_verdicts())
def test_verdicts_are_counted(said, case):
    part, change, before, after = doctored_verdicts()[case]
    text, changed = said(as_they_are)[0], said(lambda name, found: change(found) if name == part else None)[0]
    assert before in text and text.count(before) > changed.count(before)
    assert changed.count(after) > text.count(after)


SERVED = {
    "date": "2026-01-01", "commit": "1234567", "command": "python x.py", "machine": {"cores": 2},
    "pair": "automaton", "connections": 8, "requests": 2000, "disconnects": 210, "garbage": 95, "slots": 4,
    "slots_free": 3, "texts_checked": 1711, "texts_wrong": 2, "memory_before_mib": 180.5,
    "memory_after_mib": 183.0,
    "sigterm": [{"under_way": 8, "right": 8, "is_refused": True, "code": 0},
                {"under_way": 8, "right": 7, "is_refused": False, "code": 1}],
}  # fmt: skip


def test_a_soak_of_the_server_says_what_went_wrong(bench, tmp_path):
    (tmp_path / "soak-serve-cpu.json").write_text(json.dumps(SERVED))
    results = bench("quote").Results(tmp_path)
    text = " ".join("\n".join(bench("report").measured(results)).split())
    assert "2 of 1,711 texts were not what `generate` gives alone." in text
    assert "15 of 16 got theirs, later ones were refused 1 of 2 times; exit codes 0, 1." in text
    assert "| 2,000 | 210 | 95 | 180.5 | 183.0 | 3 of 4 |" in text


def test_products_of_two_models_stay_apart(said):
    """Two models have products of one shape, with heads of their own:
    each has its own row and its own time."""

    def change(name, found):
        if name == "kernels-nvidia-h200":
            for one in found["results"]:
                one["us"] = {"qwen3-8b": 111.1, "qwen3-4b": 222.2, "llama-3.1-8b": 333.3}[one["model"]]

    rows = [line for line in said(change)[0].splitlines() if re.search(r"\| (111.1|222.2|333.3) \|", line)]
    assert sum("| 6144 x 4096 |" in row for row in rows) == 2 and len(rows) == 21
    for row in rows:
        assert ("| qwen3-8b |" in row, "| qwen3-4b |" in row, "| llama-3.1-8b |" in row) == (
            "| 111.1 |" in row, "| 222.2 |" in row, "| 333.3 |" in row)  # fmt: skip


UNITS = re.compile(
    r"\d[\d.,]* ?(%|percent\b|ms\b|us\b|s\b|seconds?\b|microseconds?\b|tok/s|[KMGT]?B/s|TFLOP|times\b|x\b)"
    r"|\b(a|one|two|three|four|five|ten|several|many) (microsecond|millisecond|second|percent)s?\b"
    r"|\b(two|three|four|five|six|ten|hundred) times\b|\b(twice|half) as (fast|long)"
)


def prose():
    """The READMEs without the generated block and without code."""
    text = (ROOT / "README.md").read_text()
    report = text.split("<!-- measured: bench/report.py -->")
    text = report[0] + report[1].split("<!-- end of measured -->")[1]
    text += "".join((ROOT / folder / "README.md").read_text() for folder in ("kernels", "weights"))
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def test_the_readme_is_a_lesson_and_its_paths_are_there():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 140
    paths = re.findall(r"`((?:minidflash|kernels|weights|bench|tests)/[\w./*]+)`", text)
    assert len(paths) > 15
    for path in paths:
        names = ("qkv", "attend", "gate_up", "head") if "NAME" in path else ("",)
        for name in names:
            assert list(ROOT.glob(path.replace("NAME", name))), path.replace("NAME", name)
    for word in ("anchor", "block", "tap", "context feature", "round", "tau", "slot"):
        assert re.search(rf"^\| .*\b{word}\b.* \|", text, re.MULTILINE), word


def test_prose_claims_no_measured_number():
    found = [found[0] for found in UNITS.finditer(prose())]
    assert not found, f"measured numbers belong into bench/results and the generated block: {found}"
    for claim in (
        "takes 5 ms",
        "2 % cheaper",
        "three times faster",
        "a microsecond for",
        "14 us behind",
        "8.4 times",
    ):
        assert UNITS.search(claim)


def test_constants_in_prose_are_the_codes():
    from minidflash.kernels.cpu import sample
    from minidflash.kernels.gpu import attend_fast, cuda

    text = " ".join(prose().split())
    first, second, third = (f"{bucket:,}" for bucket in cuda.CudaBackend.buckets)
    for words in (
        f"contexts up to {first}, {second} and {third} keys",
        f"the next {cuda.AHEAD >> 20} MiB are under way",
        f"{attend_fast.TILE_ROWS} tile rows (rows times query heads) by {attend_fast.LEAF} keys",
        f"`round(2^{sample.MASS.hex()[-2:]} p / p_max)`",
        f"`0 <= temperature < {sampling.GREEDY_BELOW:.0e}` is greedy".replace("e-0", "e-"),
    ):
        assert words in text, words


@pytest.fixture
def checkout(bench, monkeypatch, tmp_path):
    """bench/record.py in a git checkout of its own."""
    monkeypatch.delenv("MINIDFLASH_COMMIT", raising=False)
    record, root = bench("record"), tmp_path / "checkout"
    (root / "bench" / "results").mkdir(parents=True)
    (root / "kernel.py").write_text("1\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], cwd=root, check=True)
    monkeypatch.setattr(record, "ROOT", root)
    monkeypatch.setattr(record, "RESULTS", root / "bench" / "results")
    monkeypatch.setattr(record, "BEGUN", record.commit())
    monkeypatch.delenv("OUT", raising=False)
    return record


def test_a_result_says_commit_changes_command_and_utc_date(checkout, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench/some.py", "--prompt", "two words"])
    path = checkout.write("some", {"ms": 1.5})
    found = json.loads(path.read_text())
    assert re.fullmatch("[0-9a-f]{7,}", found["commit"]) and found["ms"] == 1.5
    assert found["command"].endswith("bench/some.py --prompt 'two words'")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and found["machine"]["cores"]
    assert json.loads(checkout.write("other", {}).read_text())["commit"] == found["commit"], (
        "a result is no change"
    )
    (checkout.ROOT / "kernel.py").write_text("2\n")
    assert json.loads(checkout.write("some", {}).read_text())["commit"] == found["commit"] + "+changes"


def test_a_tree_that_changed_meanwhile_is_no_commit(checkout):
    """A commit during the run: it is neither the old one's result nor the new one's."""
    begun = checkout.BEGUN
    (checkout.ROOT / "kernel.py").write_text("2\n")
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-a", "-m", "b"]
    subprocess.run(command, cwd=checkout.ROOT, check=True)
    assert json.loads(checkout.write("some", {}).read_text())["commit"] == f"{begun}+changes"
