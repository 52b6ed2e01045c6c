"""A server on a real socket for tests, with a pair whose texts are drawn: each seed has its own."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx

import minidflash as md
from tests import automaton
from tests.test_chat import TEMPLATE

SLOTS, WAITING, CTX = 4, 6, 2048
PROMPT = [{"role": "user", "content": "t9"}]
LAW = {"temperature": 1.0, "top_k": 40}


def build(folder):
    """FX-S with a chat template: (target folder, drafter folder)."""
    target, drafter = automaton.build(folder, "FX-S")
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return target, drafter


def opened(folder):
    """An engine on the pair."""
    target, drafter = build(folder)
    return md.load(str(target), drafter=str(drafter), warm=False, ctx=CTX)


class Running:
    """A server in a thread of its own. url: of it. batch: a Batch, or a function that makes one."""

    def __init__(self, batch, max_waiting=WAITING, key=None, grace=30.0, defaults=None):
        from minidflash.serve.app import make_app
        from minidflash.serve.server import Server

        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        app = make_app(batch if callable(batch) else lambda: batch, max_waiting, key, defaults)
        self.engine_thread = app.state.engine_thread
        self.server = Server(app, self.engine_thread, grace)
        self.client = httpx.Client(
            base_url=self.url, timeout=60
        )  # each one reads all certificates of the machine
        self._thread = threading.Thread(target=self.server.run, args=([self._listener],), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.client.close()
        self.server.handle_exit(2, None)
        self.server.handle_exit(2, None)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def wait(self, is_so, seconds=30):
        """Wait until is_so() holds."""
        until = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < until, "it did not come about"
            time.sleep(0.01)

    def is_ready(self):
        return self.server.started and self.engine_thread.batch is not None

    def post(self, path, body, **headers):
        """(status, object) of a request."""
        found = self.client.post(path, json=body, headers=headers)
        return found.status_code, found.json()

    def get(self, path, **headers):
        """(status, text) of a page."""
        found = self.client.get(path, headers=headers)
        return found.status_code, found.text

    def metric(self, name):
        """A number of /metrics."""
        lines = self.get("/metrics")[1].splitlines()
        (found,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"minidflash_{name} ")]
        return float(found)

    @contextmanager
    def stream(self, body, path="/v1/chat/completions"):
        """The lines of a streamed answer; left early, the client is gone."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            yield response.iter_lines()


def events(lines):
    """Objects of a stream's events, the last one is "[DONE]" or an error."""
    data = [line.removeprefix("data: ") for line in lines if line and not line.startswith(":")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def text_of(found):
    """The text that chunks add up to."""
    deltas = [c["delta"] for one in found if one != "[DONE]" for c in one.get("choices", ())]
    return "".join(delta.get("content", "") for delta in deltas)
