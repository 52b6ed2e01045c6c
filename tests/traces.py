"""Trace files made by hand: every kind of round, and texts that a terminal or a browser would obey."""

import json

NASTY = [
    '</script><img src=x onerror="window.hit=1">', "<script>window.hit=1</script>", "\x1b[2J\x1b]0;owned\x07",
    "\u202etxt.exe", '" onfocus="window.hit=1" x="', "{{ 7 * 7 }}", "&lt;b&gt;",
    "</style><style>*{display:none}",
    "]]>\u2028\u2029-->", "漢字 🙂",
]  # fmt: skip
HEADER = {
    "trace": 1, "version": "0.1.0", "target": NASTY[0], "drafter": NASTY[1], "weights": None,
    "files": {"target": {NASTY[0]: "0" * 64}, "drafter": {"revision": "1" * 40}}, "backend": "numba",
    "activations": "f32", "machine": NASTY[4], "ctx": 64, "prefill_chunk": 256, "plain_seconds": 0.01,
    "options": {"max_tokens": 60, "verify": "auto", "block": 8, "drafter": True}, "prompt": [9, 9, 5],
}  # fmt: skip


def line_of(number, verify, accepted, texts=(), seconds=0.02, **more):
    """A line of a round that kept so many drafts; texts: of its tokens."""
    rows, drafts = max(1, verify), max(0, verify - 1)
    count = accepted + 1 if verify else 1
    texts = [*texts, *(f" w{number}.{i}" for i in range(len(texts), count))][:count]
    stages = {"inject": 0.001, "draft": 0.005, "verify": 0.011, "accept": 0.0001} if verify > 1 else {}
    stages = stages or ({"verify": 0.009} if verify else {"prefill": 0.02})
    return {
        "round": number, "ids": list(range(100, 100 + count)), "accepted": accepted, "verify": verify,
        "drafts": [100 + i if i < accepted else 300 + i for i in range(drafts)], "seconds": seconds,
        "text": "".join(texts), "finish_reason": None, "anchor": 7, "start": 3 + number, "injected": 1,
        "choice": [100 + i if i < count else 500 + i for i in range(rows)],
        "margins": [0.5 + i for i in range(rows)], "stages": stages, "id_texts": texts,
        "draft_texts": [texts[i] if i < accepted else f" d{i}" for i in range(drafts)],
        "choice_texts": [texts[i] if i < count else f" c{i}" for i in range(rows)],
    } | more  # fmt: skip


LINES = [
    line_of(0, 0, 0, [NASTY[0]]), line_of(1, 8, 7, NASTY[1:9]), line_of(2, 8, 0, [NASTY[9]]),
    line_of(3, 8, 3, ["a", "\n\n", "", "  "]), line_of(4, 1, 0, [" plain"]),
    line_of(5, 4, 1, [" x", " y"], finish_reason="length"),
]  # fmt: skip


def save(path, lines=LINES, header=HEADER):
    """A trace file of these lines."""
    whole = [*([header] if header else []), *lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in whole), encoding="utf-8")
    return path
