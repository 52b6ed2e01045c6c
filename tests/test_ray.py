"""Replicas by Ray Serve: the application of one; with MINIDFLASH_FULL=1 (and ray), two on this machine."""

import os
import re
import socket
import time

import httpx
import pytest

import minidflash as md
from minidflash.serve.ray_app import app_of, replicas
from tests.serve_soak import PATH, body_of
from tests.served import LAW, PROMPT, Running, build, events, opened, text_of
from tests.test_cli_process import ROOT

FULL = os.environ.get("MINIDFLASH_FULL") == "1"
TOKENS = 12


def arguments(folder, **more):
    """As a command line gives them."""
    target, drafter = build(folder)
    return {"target": str(target), "drafter": str(drafter), "ctx": "2048", "warm": False, **more}


@pytest.mark.usefixtures("one_thread")
def test_the_application_of_a_replica(tmp_path):
    given = arguments(tmp_path, key="secret", verify="8", block="8", max_tokens="5")
    app = app_of(given, 2, 3)
    thread = app.state.engine_thread
    engine = thread._open_batch().engine
    with Running(thread._open_batch(), key="secret", defaults={"max_tokens": 5}) as server:
        server.wait(server.is_ready)
        code, found = server.post(PATH, {"messages": PROMPT}, Authorization="Bearer secret")
        assert code == 200 and found["usage"]["completion_tokens"] == 5
    batch = thread._open_batch()
    assert (batch.slots, batch.ctx, batch.block, batch.verify, thread.max_waiting) == (2, 2048, 8, 8, 3)
    assert thread._defaults == {"max_tokens": 5} and engine.ctx == 2048 and given["ctx"] == "2048"


if FULL:  # a skip would be a failure in CI

    def test_two_replicas_answer(tmp_path, monkeypatch):
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray import serve

        engine = opened(tmp_path / "own")
        texts = {s: md.generate(engine, PROMPT, max_tokens=TOKENS, seed=s, **LAW).text for s in range(8)}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = {"env_vars": {"PYTHONPATH": str(ROOT), "NUMBA_NUM_THREADS": "1"}}
        ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(replicas(arguments(tmp_path / "served", replicas="2", gpus="0", slots="2")))
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                for seed, text in texts.items():
                    found = client.post(PATH, json=body_of(seed, TOKENS, False)).json()
                    assert found["choices"][0]["message"]["content"] == text
                    answer = client.post(PATH, json=body_of(seed, TOKENS, True))
                    assert text_of(events(answer.text.split("\n\n"))) == text
                with client.stream("POST", PATH, json=body_of(0, 2000, True)) as leaving:
                    next(leaving.iter_lines())
                pages = pages_of(client)
            completed = {count(page, "completed") for page in pages}
            assert len(completed) == 2 and sum(completed) == 2 * len(texts) or completed == {len(texts)}
            assert max(count(page, "cancelled") for page in pages) == 1
        finally:
            serve.shutdown()
            ray.shutdown()


def pages_of(client):
    """Pages of /metrics until both replicas have told of themselves, and one of a client that left."""
    pages, until = set(), time.monotonic() + 60
    while not any(count(page, "cancelled") for page in pages):
        assert time.monotonic() < until, pages
        pages.add(client.get("/metrics").text)
    return pages | {client.get("/metrics").text for _ in range(20)}


def count(page, how):
    """How many requests ended so."""
    return int(re.search(rf'outcome="{how}"}} (\d+)', page)[1])
