"""Peak host memory of loading a sharded checkpoint of 20 GB and more: a target with experts, to a GPU.

    python bench/host_memory.py [--layers 17] [--folder F] [--name host-memory-h200]

The checkpoint is written first, random bf16 in Qwen3-Coder-30B-A3B's shape with fewer layers. While `load`
runs, a thread looks at what the process holds: its own pages (anonymous and pinned), apart from those of the
mapped files, which the system may drop. Reports the largest tensor beside the peak. Writes
bench/results/NAME.json, or into $OUT.
"""

import argparse
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import load
import numpy as np
import record
from round import device

import minidflash as md
from minidflash.config import read_target
from tests.published import PAIRS

EVERY = 0.002  # seconds between two looks


class Watch:
    """Peaks, in bytes, of what /proc/self/status says, while the block runs."""

    FIELDS = "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin"

    def __enter__(self):
        self.peaks, self._is_over = dict.fromkeys(self.FIELDS, 0), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _look(self):
        while not self._is_over.wait(EVERY):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in self.peaks:
                    self.peaks[name] = max(self.peaks[name], int(value.split()[0]) * 1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--name", default="host-memory")
    args = parser.parse_args()
    told = PAIRS["Qwen3-Coder-30B-A3B"][0] | {"num_hidden_layers": args.layers}
    folder = Path(tempfile.mkdtemp(prefix="minidflash-memory-", dir=args.folder or load.roomy()))
    try:
        since = time.perf_counter()
        size = load.write_checkpoint(folder, read_target(told))
        (folder / "config.json").write_text(json.dumps(told))
        print(f"{size / 1e9:.2f} GB written in {time.perf_counter() - since:.1f} s", flush=True)
        ops = md.ops(args.backend)  # its libraries are no part of what loading takes
        ops.download(ops.array((1,), "f32"))
        before, since = Watch(), time.perf_counter()
        with before:
            time.sleep(0.1)
        with Watch() as watch:
            engine = md.load(str(folder), backend=args.backend, ctx=4096, warm=False)
        seconds = time.perf_counter() - since
        largest = max(
            int(np.prod(shape)) * 2
            for named in load.names.target_table(engine.target.config).values()
            for _, shape in named.sources
        )
        found = {
            "checkpoint_gb": round(size / 1e9, 2), "shards": len(list(folder.glob("*.safetensors"))),
            "largest_tensor_mb": round(largest / 1e6, 1), "load_s": round(seconds, 2),
            "before_mb": {k: round(v / 1e6, 1) for k, v in before.peaks.items()},
            "peak_mb": {k: round(v / 1e6, 1) for k, v in watch.peaks.items()},
        }  # fmt: skip
        print(found)
        print(record.write(args.name, found, **device(ops)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
