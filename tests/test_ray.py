"""Two replicas by Ray Serve on this machine: both answer, a stream is passed on, a client that leaves is noticed."""

import importlib.util
import os

import httpx
import pytest

import minidflash as md
from tests.serve_soak import PATH, body_of
from tests.served import LAW, PROMPT, build, events, opened, text_of
from tests.test_cli_process import ROOT

FULL = os.environ.get("MINIDFLASH_FULL") == "1"
pytestmark = pytest.mark.skipif(not FULL, reason="x")


def test_two_replicas_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from minidflash.serve.ray_app import replicas

    engine = opened(tmp_path / "own")
    target, drafter = build(tmp_path / "served")
    texts = {seed: md.generate(engine, PROMPT, max_tokens=12, seed=seed, **LAW).text for seed in range(8)}
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "NUMBA_NUM_THREADS": "1"}}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment, log_to_driver=True)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8321})
        serve.run(replicas({"replicas": 2, "gpus": 0, "slots": 2, "target": str(target), "drafter": str(drafter),
                            "ctx": 2048, "warm": False}), route_prefix="/")  # fmt: skip
        with httpx.Client(base_url="http://127.0.0.1:8321", timeout=60) as client:
            for seed, text in texts.items():
                found = client.post(PATH, json=body_of(seed, 12, False)).json()
                assert found["choices"][0]["message"]["content"] == text
                response = client.post(PATH, json=body_of(seed, 12, True))
                assert text_of(events(response.text.split("\n\n"))) == text
            print(client.get("/metrics").text)
    finally:
        serve.shutdown()
        ray.shutdown()
