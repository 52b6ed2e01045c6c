"""minidflash serve: many clients, SIGTERM in the middle, exit codes, what it refuses to start."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

import minidflash as md
from minidflash.cli import make_parser
from minidflash.cli.serve import open_batch
from tests.serve_soak import PATH, body_of, soak
from tests.served import LAW, PROMPT, Running, build, opened
from tests.test_cli_process import ROOT, start

TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("FX-S")


@pytest.fixture(scope="module")
def engine(folder):
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield opened(folder)
    numba.set_num_threads(before)


def texts_of(engine, seeds):
    return {s: md.generate(engine, PROMPT, max_tokens=TOKENS, seed=s, **LAW).text for s in seeds}


def test_many_clients_of_whom_some_leave_and_some_talk_nonsense(engine):
    texts = texts_of(engine, range(8))
    assert len(set(texts.values())) > 4
    with Running(md.Batch(engine, slots=4), max_waiting=8) as server:
        server.wait(server.is_ready)
        how = asyncio.run(soak(server.url, texts, 60))
        server.wait(lambda: server.engine_thread.busy == 0 and not engine.is_busy)
        assert how["left"] >= 2 and how["refused"] >= 1 and how["completed"] >= 40, how
        assert how.total() == 60 == how["left"] + how["refused"] + how["completed"], how
        assert server.metric('requests_total{outcome="completed"}') == how["completed"]
        assert server.metric('requests_total{outcome="refused"}') == how["refused"]
        # Some have left before they had asked.
        assert server.metric('requests_total{outcome="cancelled"}') <= how["left"]
        assert not server.engine_thread._tickets
        assert server.metric("waiting") == server.metric("lanes") == 0


def test_sigterm_lets_those_end_who_are_there(folder, engine):
    texts = texts_of(engine, range(8))
    target, drafter = build(folder / "again")
    process = start("-m", "minidflash", "serve", "--target", target, "--drafter", drafter, "--port", 0,
                    "--slots", 2, "--ctx", 2048)  # fmt: skip
    try:
        said = b""
        while not (found := re.search(rb"serving \S+ at (http://127.0.0.1:\d+)/v1\n", said)):
            part = process.stderr.read(4096)
            assert part, said
            said += part
        url = found[1].decode()
        done = []

        def ask(seed):
            done.append((seed, client.post(PATH, json=body_of(seed, TOKENS, False))))

        # Of two slots one has a long text; the other ones take turns.
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", PATH, json=body_of(0, 2000, True)) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            clients = [threading.Thread(target=ask, args=[seed]) for seed in texts]
            for one in clients:
                one.start()
            taken_on = f"minidflash_prompt_tokens_total {5 * (1 + len(texts))}\n"
            until = time.monotonic() + 60
            while taken_on not in client.get("/metrics").text:
                assert time.monotonic() < until
            process.send_signal(signal.SIGTERM)
            *_, last, _ = lines
            assert last == "data: [DONE]"
            for one in clients:
                one.join(60)
        assert {seed: r.json()["choices"][0]["message"]["content"] for seed, r in done} == texts
        assert process.wait(30) == 0 and b"Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_the_soak_counts_what_went_and_how_it_ended(engine, bench):
    """bench/soak_serve.py against a server in this process, which a signal stops."""
    soaking = bench("soak_serve")
    texts, args = texts_of(engine, range(4)), SimpleNamespace(requests=24, connections=3, tokens=TOKENS)
    long = md.generate(engine, PROMPT, max_tokens=4 * TOKENS, seed=0, **LAW).text
    with Running(md.Batch(engine, slots=2), max_waiting=2) as server:
        server.wait(server.is_ready)
        live = soaking.live(server.url, os.getpid(), texts, args, float("inf"), 1)
        how, marks, lanes, prompts = asyncio.run(live)
        assert how.total() == len(marks) == 12 and set(how) <= set(soaking.FINE) and lanes == 0
        assert min(marks) > 2**20 and 0 < prompts["prompt_tokens_reused"] < prompts["prompt_tokens"]
        bad = soaking.live(server.url, os.getpid(), dict.fromkeys(texts, "t1"), args, float("inf"), 2)
        assert asyncio.run(bad)[0]["wrong"] > 6
        process = SimpleNamespace(send_signal=lambda number: server.server.handle_exit(number, None))
        found = asyncio.run(soaking.ended(server.url, process, (0, long, 4 * TOKENS), 3))
        assert found == {"under_way": 3, "right": 3, "is_refused": True}
        server.wait(lambda: not server._thread.is_alive())


def test_what_cannot_be_served_is_said_in_one_line(mdf, monkeypatch, tmp_path, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = mdf("serve", "--port", taken.getsockname()[1])
    assert (code, out) == (3, "") and "Address already in use\n  hint: --port N" in err
    nothing = ["--port", 0, "--target", tmp_path]
    for given, key in ([], " "), (["--api-key", ""], "good"):
        monkeypatch.setenv("MINIDFLASH_API_KEY", key)
        code, _, err = mdf("serve", *nothing, *given)
        assert code == 2 and "the key is empty, and would let everyone in\n  hint: leave out --api-key" in err
    monkeypatch.delenv("MINIDFLASH_API_KEY")
    assert mdf("serve", *nothing, "--temperature", 1)[0] == 2
    code, _, err = mdf("serve", *nothing)  # found out while it listens
    assert code == 2 and "Traceback" not in err and err.startswith("minidflash: ")
    target, _ = build(tmp_path / "no-words")
    (target / "tokenizer.json").unlink()
    args = make_parser().parse_args(["serve", "--target", str(target), "--ctx", "64"])
    with pytest.raises(md.UserError, match=r"no tokenizer\.json, and clients send text"):
        open_batch(args)


@pytest.mark.parametrize("given, reuses", [([], True), (["--no-reuse"], False)])
def test_prompts_are_reused_unless_it_is_said(folder, given, reuses):
    target, _ = build(folder)
    args = make_parser().parse_args(["serve", "--target", str(target), "--ctx", "64", "--quiet", *given])
    assert open_batch(args).reuse is reuses


def test_a_missing_package_is_named():
    code = (
        "import sys, minidflash.cli; sys.modules['uvicorn'] = None; sys.exit(minidflash.cli.main(['serve']))"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    said = "minidflash: serving needs the package uvicorn\n  hint: pip install 'minidflash[serve]'\n"
    assert done.stderr == said
