"""A server under many clients for a while: texts stay right, memory stays as it is.

    python bench/soak_serve.py [--requests 20000] [--seconds 600] [--connections 8] [--name soak-serve-cpu]

An automaton pair whose texts are known, a server on a local socket, clients of whom a tenth leaves and a
twentieth sends what is no request (tests/serve_soak.py). Memory is read after every 200 requests. Writes
bench/results/NAME.json; exit code 1 when a text was wrong, a request went as nobody asked for, or memory grew
by more than --grow MiB after the first tenth.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from soak import resident, some

import minidflash as md
from tests.serve_soak import soak
from tests.served import LAW, PROMPT, Running, opened

FINE = "completed", "left", "refused", "completed before it left"
EACH = 200  # requests between two looks at memory


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=600.0, help="send no more after this")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--grow", type=float, default=16.0, help="MiB that memory may grow by")
    parser.add_argument("--name", default="soak-serve-cpu")
    args = parser.parse_args()
    how, marks, begun = Counter(), [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = opened(Path(folder))
        texts = {s: md.generate(engine, PROMPT, max_tokens=24, seed=s, **LAW).text for s in range(16)}
        with Running(md.Batch(engine, slots=args.slots), max_waiting=args.connections) as server:
            server.wait(server.is_ready)
            while how.total() < args.requests and time.perf_counter() - begun < args.seconds:
                how += asyncio.run(soak(server.url, texts, EACH, args.connections, seed=len(marks)))
                server.wait(lambda: server.engine_thread.busy == 0)
                marks.append(resident())
            lost = len(server.engine_thread._tickets)
    grown = (max(marks) - marks[len(marks) // 10]) / 2**20
    is_right = not lost and all(kind in FINE for kind in how)
    found = {
        "requests": how.total(), "how": dict(how), "is_right": is_right, "is_flat": grown <= args.grow,
        "grown_mib": round(grown, 2), "resident_mib": [round(m / 2**20, 1) for m in some(marks)],
        "connections": args.connections, "slots": args.slots,
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip
    print(found)
    print(record.write(args.name, found))
    return 0 if is_right and found["is_flat"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
