"""minidflash serve over real sockets: answers, refusals, clients that leave, the end."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

import minidflash as md
from minidflash.serve.metrics import BOUNDS, Meters
from minidflash.stats import Round
from tests.served import LAW, PROMPT, SLOTS, WAITING, Running, events, opened, text_of

WIDTH = 4  # fixed: what "auto" takes, and so how many rounds a text has, is a matter of the load
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"messages": PROMPT, "max_tokens": 2000} | LAW


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield opened(tmp_path_factory.mktemp("FX-S"))
    numba.set_num_threads(before)


@pytest.fixture(scope="module")
def server(engine):
    with Running(md.Batch(engine, slots=SLOTS, verify=WIDTH)) as running:
        running.wait(running.is_ready)
        yield running


@pytest.fixture(scope="module")
def alone(server, engine):
    """What `generate` gives for a prompt and keywords, while the server does nothing."""
    known = {}

    def call(prompt=PROMPT, **options):
        key = json.dumps([prompt, options], sort_keys=True)
        if key not in known:
            server.wait(lambda: not server.engine_thread.busy and not engine.is_busy)
            known[key] = md.generate(engine, prompt, **options)
        return known[key]

    return call


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_the_official_client_gets_the_text_that_generate_gives(client, alone, engine):
    want = alone(max_tokens=12, seed=3, verify=WIDTH, **LAW)
    asked = {"model": engine.target_name, "messages": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": 12}
    found = client.chat.completions.create(**asked, extra_body={"top_k": 40})
    assert found.choices[0].message.content == want.text and found.choices[0].finish_reason == "length"
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (want.prompt_tokens, 12)
    assert usage.total_tokens == want.prompt_tokens + 12
    assert found.model == engine.target_name and "f32" in found.system_fingerprint
    chunks = list(client.chat.completions.create(**asked, extra_body={"top_k": 40}, stream=True,
                                                 stream_options={"include_usage": True}))  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == want.text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert not chunks[-1].choices and len({c.id for c in chunks}) == 1
    again = chunks[-1].usage
    assert 0 < again.prompt_tokens_details.cached_tokens < want.prompt_tokens
    assert again.model_copy(update={"prompt_tokens_details": usage.prompt_tokens_details}) == usage
    assert all(c.usage is None for c in chunks[:-1]) and len(chunks) <= 2 + len(want.rounds)
    assert [m.id for m in client.models.list()] == [engine.target_name]


def test_text_completions_and_ids(client, alone):
    want = alone("t9 t5", raw=True, max_tokens=9, seed=5, **LAW)
    asked = {"model": "", "prompt": "t9 t5", "temperature": 1.0, "seed": 5, "max_tokens": 9}
    with pytest.raises(openai.NotFoundError, match="there is no model ''"):
        client.completions.create(**asked)
    asked = asked | {"model": client.models.list().data[0].id, "extra_body": {"top_k": 40}}
    found = client.completions.create(**asked, logprobs=0)
    assert found.choices[0].text == want.text and found.usage.prompt_tokens == 2
    told = alone("t9 t5", raw=True, max_tokens=9, seed=5, logprobs=True, **LAW)
    assert found.choices[0].logprobs.token_logprobs == [own for _, own in told.logprobs]
    assert " ".join(found.choices[0].logprobs.tokens) == want.text
    by_ids = client.completions.create(**asked | {"prompt": [9, 5]}, stream=True)
    chunks = list(by_ids)
    assert "".join(c.choices[0].text for c in chunks) == want.text
    assert chunks[-1].usage.completion_tokens == 9 and chunks[-1].choices[0].finish_reason == "length"


def test_chat_logprobs_are_the_models_own(client, alone):
    want = alone(max_tokens=8, seed=3, logprobs=True, **LAW)
    asked = {"messages": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": 8, "logprobs": True}
    model = client.models.list().data[0].id
    found = client.chat.completions.create(model=model, **asked, extra_body={"top_k": 40}).choices[0].logprobs
    assert [one.logprob for one in found.content] == [own for _, own in want.logprobs]
    assert [bytes(one.bytes).decode() for one in found.content] == want.text.split()


def test_stop_strings_and_end_tokens_say_stop(server, alone):
    want = alone(max_tokens=30, seed=3, **LAW)
    stop = want.text.split()[5]
    cut = alone(max_tokens=30, seed=3, stop=[stop], **LAW)
    for given in (stop, [stop]):
        code, found = server.post(
            CHAT, {"messages": PROMPT, "max_tokens": 30, "seed": 3, "stop": given} | LAW
        )
        choice = found["choices"][0]
        assert code == 200 and choice["message"]["content"] == cut.text and choice["finish_reason"] == "stop"
        assert found["usage"]["completion_tokens"] == len(cut.tokens)
    with server.stream({"messages": PROMPT, "max_tokens": 30, "seed": 3, "stop": stop} | LAW) as lines:
        found = events(lines)
    assert text_of(found) == cut.text and found[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_answers_have_the_seeds_that_follow(server, alone, is_streamed):
    want = [alone(max_tokens=7, seed=seed, **LAW).text for seed in (4, 5, 6)]
    body = {"messages": PROMPT, "max_tokens": 7, "seed": 4, "n": 3} | LAW
    if is_streamed:
        with server.stream(body) as lines:
            found = events(lines)
        texts = ["", "", ""]
        for one in found[:-1]:
            for choice in one["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == want and [one for one in found[:-1] if "usage" in one] == found[-2:-1]
        assert found[-2]["usage"]["completion_tokens"] == 21
    else:
        _, found = server.post(CHAT, body)
        assert [c["message"]["content"] for c in found["choices"]] == want
        assert found["usage"]["completion_tokens"] == 21


REFUSED = [  # path, body, status, param, words
    (CHAT, {"messages": PROMPT, "tools": [{"type": "function"}]}, 400, "tools", "'tools' is not supported"),
    (CHAT, {"messages": PROMPT, "response_format": {"type": "json_object"}}, 400, "response_format", "leave"),
    (CHAT, {"messages": PROMPT, "frequency_penalty": 0.5}, 400, "frequency_penalty", "not supported"),
    (CHAT, {"messages": PROMPT, "logit_bias": {"5": 1}}, 400, "logit_bias", "not supported"),
    (CHAT, {"messages": PROMPT, "top_logprobs": 2}, 400, "top_logprobs", "not supported"),
    (CHAT, {"messages": PROMPT, "toolz": 1}, 400, "toolz", "not supported"),
    (CHAT, {"messages": PROMPT, "prompt": "t9"}, 400, "prompt", "not supported"),
    (CHAT, {"messages": [{"role": "user", "content": "t9", "name": "a"}]}, 400, "messages[0].name", "leave"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "content is None, need a text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content",
     "need a text"),
    (CHAT, {"messages": []}, 400, "messages", "at least one message"),
    (CHAT, {"messages": PROMPT, "temperature": "hot"}, 400, "temperature", "need a number from 0 up"),
    (CHAT, {"messages": PROMPT, "top_p": 2, "temperature": 1}, 400, "top_p", "top_p is 2, need"),
    (CHAT, {"messages": PROMPT, "seed": 3}, 400, "seed", "seed has no effect at temperature 0"),
    (CHAT, {"messages": PROMPT, "n": 2}, 400, "n", "n has no effect at temperature 0"),
    (CHAT, {"messages": PROMPT, "n": 99, "temperature": 1}, 400, "n", "takes on 10 answers at a time"),
    (CHAT, {"messages": PROMPT, "max_tokens": 0}, 400, "max_tokens", "from 1 up"),
    (CHAT, {"messages": PROMPT, "max_tokens": 1, "max_completion_tokens": 1}, 400, "max_tokens", "one limit"),
    (CHAT, {"messages": PROMPT, "max_completion_tokens": -1}, 400, "max_tokens", "max_tokens is -1"),
    (CHAT, {"messages": PROMPT, "max_tokens": 9999}, 400, "max_tokens", "need 10004 positions, 2048"),
    (CHAT, {"messages": PROMPT, "stream": "yes"}, 400, "stream", "need true or false"),
    (CHAT, {"messages": PROMPT, "stream_options": {"include_usage": True}}, 400, "stream_options", "no"),
    (CHAT, {"messages": PROMPT, "stream": True, "stream_options": {"a": 1}}, 400, "stream_options", "alone"),
    (CHAT, {"messages": PROMPT, "chat_template_kwargs": {"colour": 1}}, 400, None, "does not read 'colour'"),
    (CHAT, {"messages": PROMPT, "chat_template_kwargs": [1]}, 400, "chat_template_kwargs", "need names"),
    (CHAT, {"messages": PROMPT, "model": "gpt-4"}, 404, "model", "there is no model 'gpt-4' here"),
    (TEXT, {"prompt": "t9", "logprobs": 3}, 400, "logprobs", "need 0"),
    (TEXT, {"prompt": ["t9", "t9"]}, 400, "prompt", "need a text or a list of token ids"),
    (TEXT, {"prompt": [9, 64]}, 400, None, "token 64"),
    (TEXT, {"prompt": ""}, 400, None, "the prompt is empty"),
    (TEXT, {"messages": PROMPT}, 400, "messages", "not supported"),
    (TEXT, {}, 400, "prompt", "prompt is missing"),
    (TEXT, [], 400, None, "need a JSON object"),
    ("/v1/embeddings", {}, 404, None, "POST /v1/embeddings: Not Found"),
]  # fmt: skip


def test_what_is_not_understood_is_refused_by_its_name(server):
    for path, body, status, param, words in REFUSED:
        code, found = server.post(path, body)
        error = found["error"]
        assert (code, error["param"]) == (status, param) and words in error["message"], (body, found)
        assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    for data, kind, status, words in [
        (b"{", "application/json", 400, "the body is not JSON"),
        (b"[" * 100000, "application/json", 400, "the body is not JSON"),
        (b"\xff\xfe", "application/json", 400, "the body is not JSON"),
        (b"{}", "text/plain", 415, "send Content-Type: application/json"),
        (b" " * (9 << 20), "application/json", 413, "more than"),
    ]:
        found = server.client.post(CHAT, content=data, headers={"Content-Type": kind})
        assert found.status_code == status and words in found.json()["error"]["message"]


def test_what_asks_for_nothing_is_taken(server, alone):
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "t9"}], "name": None}],
            "max_completion_tokens": 4, "frequency_penalty": 0, "presence_penalty": 0.0, "tools": [],
            "response_format": {"type": "text"}, "seed": None, "stop": None, "temperature": 0, "n": 2,
            "user": "me"}  # fmt: skip
    code, found = server.post(CHAT, body)
    assert code == 200, found
    assert [c["message"]["content"] for c in found["choices"]] == [alone(max_tokens=4).text] * 2


def test_a_full_queue_says_when_to_come_back(server):
    before = server.metric('requests_total{outcome="cancelled"}')
    streams = []
    try:
        for _ in range(SLOTS + WAITING):
            request = server.client.build_request("POST", CHAT, json=ENDLESS | {"stream": True})
            streams.append(server.client.send(request, stream=True))
        assert (server.metric("lanes"), server.metric("waiting")) == (SLOTS, WAITING)
        found = server.client.post(CHAT, json=ENDLESS)
        assert found.status_code == 429 and int(found.headers["Retry-After"]) >= 1
        assert found.json()["error"]["code"] == "queue_full"
        streams.pop().close()  # one leaves, and there is room for one
        server.wait(lambda: server.metric("waiting") == WAITING - 1)
        with server.stream(ENDLESS) as lines:
            assert server.metric("waiting") == WAITING
            assert server.post(CHAT, ENDLESS)[0] == 429
            assert lines is not None
    finally:
        for stream in streams:
            stream.close()
    server.wait(lambda: server.engine_thread.busy == 0)
    assert server.metric('requests_total{outcome="cancelled"}') == before + SLOTS + WAITING + 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_is_not_computed_for(server, engine, is_streamed):
    before = server.metric("tokens_total")
    if is_streamed:
        with server.stream(ENDLESS | {"max_tokens": 2040}) as lines:
            next(lines)
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(CHAT, json=ENDLESS | {"max_tokens": 2040}, timeout=httpx.Timeout(5, read=0.1))
    server.wait(lambda: server.engine_thread.busy == 0 and not engine.is_busy, seconds=5)
    assert server.metric("tokens_total") - before < 1500


def test_health_and_metrics_tell_what_ran(server, alone):
    names = "tokens_total", "prompt_tokens_total", "first_token_seconds_count"
    before = [server.metric(name) for name in names]
    want = alone(max_tokens=12, seed=3, **LAW)
    asked = {"messages": PROMPT, "max_tokens": 12, "seed": 3} | LAW
    server.post(CHAT, asked)
    code, text = server.get("/health")
    assert (
        code == 200 and json.loads(text)["status"] == "ok" and 0 <= json.loads(text)["last_round_s_ago"] < 30
    )
    gained = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert gained == [12, want.prompt_tokens, 1] and 1 <= server.metric("tau") <= 8
    reused = server.metric("prompt_tokens_reused_total")
    details = server.post(CHAT, asked)[1]["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == server.metric("prompt_tokens_reused_total") - reused > 0
    for line in server.get("/metrics")[1].splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


def test_queue_and_gaps_between_rounds_are_told(server, alone):
    names = "queue_seconds_count", "first_token_seconds_count", "round_gap_seconds_count", "rounds_total"
    names += "first_token_seconds_sum", "queue_seconds_sum", "round_gap_seconds_sum"
    alone(max_tokens=40, seed=3, **LAW)  # what is compiled then is compiled before
    before = [server.metric(name) for name in names]
    since = time.monotonic()
    with ThreadPoolExecutor(SLOTS + 2) as pool:  # two of them wait for a slot
        list(pool.map(lambda i: server.post(CHAT, {"messages": PROMPT, "max_tokens": 40, "seed": i} | LAW),
                      range(SLOTS + 2)))  # fmt: skip
    took = time.monotonic() - since
    gained = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
    queued, begun, gaps, rounds, first_s, queued_s, gap_s = gained
    assert queued == begun == SLOTS + 2 and gaps == rounds >= 1
    assert 0 < queued_s < first_s and 0 < gap_s and first_s + gap_s <= (SLOTS + 2) * took


def test_histograms_are_what_prometheus_reads():
    """A value at a bound lies within it; each bucket holds those below it too."""
    meters = Meters()
    first = Round([5], seconds=0.02)
    for waited in (0.01, 0.011, 0.1, 99.0):
        meters.add(first, True, waited=waited)
    meters.add(Round([5, 6], verify=4, seconds=0.004), True, gap=0.005)
    lines = [line for line in meters.text(4, 0).splitlines() if not line.startswith("#")]
    found = {name: float(number) for name, _, number in (line.rpartition(" ") for line in lines)}

    def buckets(name):
        begin = f'minidflash_{name}_bucket{{le="'
        told = {key.removeprefix(begin)[:-2]: count for key, count in found.items() if key.startswith(begin)}
        assert list(told)[-1] == "+Inf" and told["+Inf"] == found[f"minidflash_{name}_count"]
        assert list(told.values()) == sorted(told.values())
        assert [float(bound) for bound in told] == sorted(float(bound) for bound in told)
        return told

    waits, queue, gaps = (buckets(name) for name in BOUNDS)
    assert (waits["0.01"], waits["0.025"], waits["0.05"], waits["0.1"], waits["60"]) == (1, 2, 2, 3, 3)
    assert found["minidflash_first_token_seconds_sum"] == pytest.approx(99.121)
    assert found["minidflash_queue_seconds_sum"] == pytest.approx(0.08 + 98.98) and queue["+Inf"] == 4
    assert (gaps["0.002"], gaps["0.005"], found["minidflash_round_gap_seconds_count"]) == (0, 1, 1)
    assert meters.text(4, 0).count("# TYPE minidflash_round_gap_seconds histogram\n") == 1


def test_a_key_is_asked_for(engine):
    with Running(md.Batch(engine), key="secret") as server:
        server.wait(server.is_ready)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secretly"}):
            code, found = server.post(CHAT, {"messages": PROMPT}, **headers)
            assert code == 401 and found["error"]["code"] == "invalid_api_key"
            assert server.get("/v1/models", **headers)[0] == 401
        assert server.post(TEXT, {"prompt": "t9", "max_tokens": 1}, Authorization="Bearer secret")[0] == 200
        assert server.get("/v1/models", Authorization="Bearer secret")[0] == 200
        assert server.get("/health")[0] == server.get("/metrics")[0] == 200


def test_while_it_loads_requests_come_back_later(engine):
    is_loaded = threading.Event()

    def open_batch():
        is_loaded.wait(30)
        return md.Batch(engine)

    with Running(open_batch) as server:
        server.wait(lambda: server.server.started)
        code, found = server.post(CHAT, {"messages": PROMPT})
        assert (code, found["error"]["code"]) == (503, "loading")
        assert server.get("/health")[0] == 503 and '"loading"' in server.get("/health")[1]
        is_loaded.set()
        server.wait(server.is_ready)
        assert server.get("/health")[0] == 200


@pytest.mark.parametrize("grace", [30.0, 0.05])
def test_the_end_lets_answers_end_for_a_while(engine, grace):
    body = ENDLESS | {"max_tokens": 400 if grace > 1 else 2040}
    with Running(md.Batch(engine, slots=SLOTS), grace=grace) as server:
        server.wait(server.is_ready)
        with server.stream(body) as lines:
            first = next(lines)
            server.server.handle_exit(15, None)
            if grace > 1:
                server.wait(lambda: server.engine_thread.is_stopping)
                code, found = server.post(CHAT, body)
                assert (code, found["error"]["code"]) == (503, "stopping")
                assert '"stopping"' in server.get("/health")[1]
            found = events([first, *lines])
        if grace > 1:
            assert found[-1] == "[DONE]" and found[-2]["usage"]["completion_tokens"] == 400
        else:
            assert found[-1]["error"]["code"] == "stopping"
        server.wait(lambda: not server._thread.is_alive())


def test_a_failure_is_told_and_the_next_request_goes_well(engine, alone, monkeypatch):
    want, fails, step = alone(max_tokens=6), [RuntimeError("a kernel broke")], md.Batch._step

    def failing(self):
        if fails:
            raise fails.pop()
        step(self)

    monkeypatch.setattr(md.Batch, "_step", failing)
    with Running(md.Batch(engine)) as server:
        server.wait(server.is_ready)
        code, found = server.post(CHAT, {"messages": PROMPT, "max_tokens": 6})
        assert code == 500 and found["error"]["type"] == "server_error" and "kernel" not in str(found)
        assert server.metric('requests_total{outcome="failed"}') == 1
        code, found = server.post(CHAT, {"messages": PROMPT, "max_tokens": 6})
        assert code == 200 and found["choices"][0]["message"]["content"] == want.text


def test_a_quiet_stream_says_that_it_lives(engine, monkeypatch):
    monkeypatch.setattr("minidflash.serve.app.SILENCE_S", 0.05)
    step = md.Batch._step

    def slow(self):
        time.sleep(0.3)
        step(self)

    monkeypatch.setattr(md.Batch, "_step", slow)
    with Running(md.Batch(engine)) as server:
        server.wait(server.is_ready)
        with server.stream({"messages": PROMPT, "max_tokens": 4}) as lines:
            found = list(lines)
    assert found[0].startswith(":") and found[-2] == "data: [DONE]"
