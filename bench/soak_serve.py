"""A server under many clients for a while: texts stay right, memory stays as it is.

    python bench/soak_serve.py [--requests 2000] [--pair automaton] [--seconds 600] [--connections 8]
        [--name soak-serve-cpu]

`minidflash serve` as a process of its own on a local socket, clients of whom a tenth leaves and a twentieth
sends what is no request (tests/serve_soak.py), texts that are known. Half way SIGTERM comes while all clients
wait for a text: these are finished, later ones refused, and a second server goes on. Memory of the server is
read after every fiftieth of the requests. Pairs: an automaton's, or the embedded one. Writes
bench/results/NAME.json; exit code 1 when a text was wrong, a request went as nobody asked for, a slot stayed
taken, SIGTERM broke a text, or memory grew by more than --grow MiB after the first tenth of a server's life.
"""

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import record
from soak import resident, some

import minidflash as md
from tests.serve_soak import PATH, ask, body_of, soak
from tests.served import CTX, LAW, PROMPT, build

FINE = "completed", "left", "refused", "completed before it left"
SEEDS, LOOKS, LONG = range(16), 50, 4  # texts that are known, looks at memory, long texts in times of others
PAIRS = "automaton", "embedded"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pair", choices=PAIRS, default="automaton")
    parser.add_argument("--tokens", type=int, default=24, help="of a text")
    parser.add_argument("--seconds", type=float, default=600.0, help="send no more after this")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--grow", type=float, default=16.0, help="MiB that memory may grow by")
    parser.add_argument("--name", default="soak-serve-cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(pair_of(args.pair, folder), args)
    print(found)
    print(record.write(args.name, found, pair=args.pair, tokens=args.tokens))
    return int(not (found["is_right"] and found["is_flat"]))


def pair_of(name, folder):
    """Arguments of `load` for a pair."""
    if name == "embedded":
        return {}
    target, drafter = build(Path(folder))
    return {"target": str(target), "drafter": str(drafter)}


def measure(pair, args):
    """Two servers, one after the other, and what became of their clients."""
    texts, long = known(pair, args.tokens)
    begun, lives, ends = time.perf_counter(), [], []
    for number in (1, 2):
        with server_of(pair, args) as (process, url):
            until = begun + args.seconds * number / 2
            lives.append(asyncio.run(live(url, process.pid, texts, args, until, number)))
            ends.append(end(url, process, long, args))
    how = sum((how for how, *_ in lives), Counter())
    prompts = sum((prompts for *_, prompts in lives), Counter())
    checked = how["completed"] + how["wrong"] + sum(one["under_way"] for one in ends)
    taken, (_, marks, *_) = sum(taken for *_, taken, _ in lives), max(lives, key=lambda one: grown(one[1]))
    broken = sum(one["under_way"] - one["right"] for one in ends)
    is_ended = not broken and all(one["is_refused"] and one["code"] == 0 for one in ends)
    return {
        "requests": how.total(), "how": dict(how), "disconnects": how["left"], "garbage": how["refused"],
        "texts_checked": checked, "texts_wrong": how["wrong"] + broken, **prompts,
        "memory_before_mib": mib(settled(marks)), "memory_after_mib": mib(marks[-1]),
        "grown_mib": mib(grown(marks)), "resident_mib": [[mib(m) for m in some(one[1])] for one in lives],
        "slots": args.slots, "slots_free": args.slots - taken, "connections": args.connections,
        "sigterm": ends, "seconds": round(time.perf_counter() - begun, 1),
        "is_right": is_ended and taken == 0 and all(kind in FINE for kind in how),
        "is_flat": grown(marks) <= args.grow * 2**20,
    }  # fmt: skip


def known(pair, tokens):
    """({seed: text}, (seed, text, its tokens) of a long one), each generated alone."""
    engine = md.load(**pair, warm=False, ctx=CTX)
    alone = {s: md.generate(engine, PROMPT, max_tokens=tokens, seed=s, **LAW).text for s in SEEDS}
    long = md.generate(engine, PROMPT, max_tokens=LONG * tokens, seed=0, **LAW)
    return alone, (0, long.text, LONG * tokens)


@contextmanager
def server_of(pair, args):
    """`minidflash serve` of a pair: (process, url)."""
    flags = [word for name, value in pair.items() for word in (f"--{name}", value)]
    flags += ["--port", "0", "--slots", str(args.slots), "--max-waiting", str(args.connections)]
    command = [sys.executable, "-m", "minidflash", "serve", "--ctx", str(CTX), *flags]
    process = subprocess.Popen(command, cwd=record.ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"serving \S+ at (http://\S+)/v1$", line.rstrip()):
                break
        else:
            raise SystemExit("the server did not start")
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


async def live(url, pid, texts, args, until, number):
    """Half of the requests. Returns (how they went, bytes of the server's memory, slots that stay taken,
    tokens of prompts and those of them that did not run)."""
    how, marks, each = Counter(), [], max(1, args.requests // LOOKS)
    while how.total() < args.requests / 2 and time.perf_counter() < until:
        seed = number * 10**6 + len(marks)
        how += await soak(url, texts, each, args.connections, seed=seed, max_tokens=args.tokens)
        marks.append(resident(pid))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for _ in range(100):  # those that left are noticed a round later
            if not (lanes := await busy(client, "lanes")):
                break
            await asyncio.sleep(0.1)
        names = "prompt_tokens", "prompt_tokens_reused"
        prompts = Counter({name: await busy(client, f"{name}_total") for name in names})
    return how, marks, lanes, prompts


async def busy(client, names):
    """The sum of some gauges of /metrics. names: a part of a pattern."""
    page = (await client.get("/metrics")).text
    return sum(map(int, re.findall(rf"^minidflash_(?:{names}) (\d+)$", page, re.MULTILINE)))


def end(url, process, long, args):
    """SIGTERM while all clients wait for a long text: how many do, get theirs, whether another is refused,
    and the process's exit code."""
    found = asyncio.run(ended(url, process, long, args.connections))
    return found | {"code": process.wait(60)}


async def ended(url, process, long, clients):
    seed, text, tokens = long
    limits = httpx.Limits(max_connections=clients + 1)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
        asking = [asyncio.ensure_future(ask(client, i % 2, seed, text, tokens)) for i in range(clients)]
        while await busy(client, "lanes|waiting") < clients and not any(one.done() for one in asking):
            pass
        process.send_signal(signal.SIGTERM)
        is_refused = False
        while not is_refused and not all(one.done() for one in asking):
            try:
                is_refused = (await client.post(PATH, json=body_of(seed, 1, False))).status_code == 503
            except httpx.TransportError:  # it listens no more
                is_refused = True
        how = Counter(await asyncio.gather(*asking))
    return {"under_way": clients, "right": how["completed"], "is_refused": is_refused}


def settled(marks):
    """Memory of a server after the first tenth of its life."""
    return marks[len(marks) // 10]


def grown(marks):
    """Bytes that memory grew by since then."""
    return max(marks) - settled(marks)


def mib(size):
    return round(size / 2**20, 1)


if __name__ == "__main__":
    raise SystemExit(main())
