"""Plants faults one at a time and runs the tests that are meant to see each: which survive?

    python tests/faults/plant.py [NAME ...] [--file TOPIC ...] [--jobs 2] [--json [FILE]] [--list] [--gpu]

A fault is an entry of tests/faults/TOPIC.toml: the text `old`, which stands once in `file`, becomes `new`,
and pytest with the arguments `tests` must then fail; the same tests must pass without it. This happens in
copies of the tree under .cache/faults, with caches of their own. Exit code 1 when a fault survives,
its patch is stale, or its tests say nothing.
"""

import argparse
import os
import queue
import re
import sys
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path.insert(0, str(ROOT))

from tests.faults.tree import LIMIT, Tree

UNFIT = re.compile(  # the patch is no program: that any test fails then says nothing
    r"([\w.]*\.)?(SyntaxError|IndentationError|NameError|UnboundLocalError|ImportError|ModuleNotFoundError|"
    r"TypingError|LoweringError|UnsupportedError)\b|"
    r"RuntimeError: (g\+\+ could not build|NVRTC could not compile)"
)


@dataclass(frozen=True)
class Fault:
    """breaks: "row NAME BACKEND" (oracle, numba, cuda), "promise: ..." or "tool NAME".
    tests: arguments of pytest.

    gpu: only a GPU shows it. says: words that the failing test must say. compiles:
    false where the refusal of a compiler is what shows it.
    """

    topic: str
    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: str
    gpu: bool = False
    says: str = ""
    compiles: bool = True


@dataclass
class Outcome:
    """status: caught, survived, stale (the patch fits no more) or broken (the tests say nothing)."""

    name: str
    breaks: str
    file: str
    tests: str
    status: str = "stale"
    seconds: float = 0.0
    by: str = ""  # the test that failed first
    why: str = ""  # of what was not caught; words of a caught one would name folders of this machine


def read(folder=FOLDER):
    """All faults, by file and order. Errors: ValueError naming an entry of another form,
    or a name used twice."""
    faults = []
    for path in sorted(Path(folder).glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            try:
                faults.append(Fault(path.stem, **entry))
            except TypeError as error:
                raise ValueError(f"{path.name}: {entry.get('name')}: {error}") from None
    twice = [name for name, count in Counter(f.name for f in faults).items() if count > 1]
    if twice:
        raise ValueError(f"there are two faults {twice[0]}")
    return faults


def judge(fault, run):
    """(status, why) of a run with the fault planted."""
    if run.code is None:
        return "broken", f"not ended after {LIMIT} s"
    if run.code == 0:
        return ("survived", "") if run.passed else ("broken", "all tests were skipped")
    if run.code != 1 or (fault.compiles and UNFIT.match(run.why)):
        return "broken", f"pytest ended with {run.code}: {run.why}"
    if fault.says not in run.why:
        return "survived", f"found, but not under its name: {run.why}"
    return "caught", ""


def plant_group(tree, tests, faults, say):
    """Outcomes of the faults that these tests are for."""
    before = tree.test(tests)
    for fault in faults:
        out = Outcome(fault.name, fault.breaks, fault.file, tests)
        if not tree.fits(fault):
            out.why = f"`old` does not stand once in {fault.file}"
        elif before.code != 0 or not before.passed:
            out.status, out.why = "broken", f"without the fault: {before.by} {before.why}"
        else:
            with tree.planted(fault):
                run = tree.test(tests)
            out.status, out.why = judge(fault, run)
            out.seconds, out.by = round(run.seconds, 1), run.by
        say(out)
        yield out


def plant(faults, root=ROOT, place=None, jobs=1, say=lambda outcome: None):
    """Outcomes of all faults, in their order. place: the folder for copies.
    say: called with each as it is known."""
    groups, trees = {}, queue.SimpleQueue()
    for fault in faults:
        groups.setdefault(fault.tests, []).append(fault)
    for number in range(min(jobs, len(groups))):
        trees.put(Tree(root, (place or Path(root) / ".cache" / "faults") / str(number)))

    def work(tests):
        tree = trees.get()
        try:
            return list(plant_group(tree, tests, groups[tests], say))
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            found = {out.name: out for outs in pool.map(work, groups) for out in outs}
        except BaseException:  # Ctrl-C: what was begun ends, nothing more begins
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[fault.name] for fault in faults]


def chosen(args, parser):
    """The faults that the command line names."""
    faults = read()
    unknown = {*args.names, *(args.file or ())} - {f.name for f in faults} - {f.topic for f in faults}
    if unknown:
        parser.error(f"there is no fault or topic {', '.join(sorted(unknown))}: --list says what there is")
    names, topics = args.names or {f.name for f in faults}, args.file or {f.topic for f in faults}
    return [f for f in faults if f.name in names and f.topic in topics and f.gpu == args.gpu]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="these faults (default: all)")
    parser.add_argument("--file", nargs="+", metavar="TOPIC", help="those of tests/faults/TOPIC.toml")
    parser.add_argument("--jobs", type=int, default=2, help="side by side (default %(default)s)")
    parser.add_argument("--json", nargs="?", const=ROOT / "bench/results/faults.json", type=Path,
                        metavar="FILE", help="write the outcomes, by default to "
                                             "bench/results/faults.json")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="say what there is, plant nothing")
    parser.add_argument(
        "--gpu", action="store_true", help="those that only a GPU shows, instead of all others"
    )
    args = parser.parse_args()
    faults = chosen(args, parser)
    if args.list:
        print("\n".join(f"{f.name:44} {f.breaks:44} {f.file}" for f in faults))
        return 0

    sys.path.append(str(ROOT / "bench"))
    import record

    # Of what is copied now, whatever is edited meanwhile.
    os.environ["MINIDFLASH_COMMIT"] = record.commit() or ""
    begun = time.perf_counter()
    outcomes = plant(
        faults, jobs=args.jobs,
        say=lambda out: print(f"{out.status:9}{out.seconds:6.1f} s  {out.name}  {out.by or out.why}",
                              flush=True),
    )  # fmt: skip
    counts = dict(Counter(out.status for out in outcomes))
    for out in outcomes:
        if out.status != "caught":
            print(f"\n{out.status}: {out.name} ({out.breaks})\n    {out.file}; {out.tests}\n    {out.why}")
    print(f"\n{len(outcomes)} faults: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    if args.json:
        numbers = {
            "seconds": round(time.perf_counter() - begun),
            **counts,
            "faults": [*map(asdict, outcomes)],
        }
        print(record.write(str(args.json.resolve().with_suffix("")), numbers))
    return int(set(counts) != {"caught"})


if __name__ == "__main__":
    raise SystemExit(main())
