"""The ASGI application: routes, and how an answer reaches a client that may leave at any time."""

import asyncio
import hmac
import json
import time
from contextlib import aclosing, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from .. import __version__
from ..run import machine_of
from . import answers, fields
from .engine_thread import EngineThread
from .refusal import Refusal

MOST_BYTES = 8 << 20  # of a body
SILENCE_S = 15.0  # after which a stream says that it lives
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
          (b"x-accel-buffering", b"no")]  # fmt: skip


def make_app(open_batch, max_waiting=64, key=None, defaults=None, on_open=None):
    """The application.

    open_batch: () -> Batch; called once the server runs, in the thread that then runs it. Requests get 503
    until it returns. max_waiting: requests beyond the batch's slots; one more gets 429. key: what /v1 asks
    for as a bearer token, or None. defaults: keywords of `generate` that a request need not give. on_open:
    called on the event loop once the batch is open or cannot be opened.
    Returns a Starlette application whose `state.engine_thread` is the EngineThread. Errors: none.
    Source: OpenAI's API reference.
    """
    service = Service(EngineThread(open_batch, max_waiting, defaults or {}), key)

    @asynccontextmanager
    async def lifespan(app):
        service.thread.start(on_open)
        yield
        await service.thread.end()

    routes = [
        Route("/v1/chat/completions", Completions(service, fields.read_chat, answers.Chat), methods=["POST"]),
        Route("/v1/completions", Completions(service, fields.read_text, answers.Text), methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
    ]
    handlers = {Refusal: refused, HTTPException: not_routed, Exception: broken}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.engine_thread = service.thread
    return app


class Service:
    """What the routes share. thread: EngineThread."""

    def __init__(self, thread, key):
        self.thread, self._key, self._since = thread, key and key.encode(), int(time.time())

    def check_key(self, request):
        """Errors: Refusal 401 for a request without the key."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._key and not hmac.compare_digest(given, self._key):
            words = "this server wants its key: Authorization: Bearer KEY"
            raise Refusal(401, words, code="invalid_api_key")

    def facts(self, model):
        """What every object says of the engine; equal fingerprint and seed, equal text.
        Errors: Refusal 404 for a model that is not here."""
        engine = self.thread.batch.engine
        if model not in (None, engine.target_name):
            words = f"there is no model {model!r} here, but {engine.target_name!r}"
            raise Refusal(404, words, "model", "model_not_found")
        told = __version__, engine.ops.name, engine.ops.activations, f"{engine.target.nbytes} bytes"
        return {"model": engine.target_name, "system_fingerprint": "; ".join([*told, machine_of(engine.ops)])}

    async def models(self, request):
        """GET /v1/models."""
        self.check_key(request)
        with self.thread.place(0):
            model = self.facts(None)["model"]
        one = {"id": model, "object": "model", "created": self._since, "owned_by": "minidflash"}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(self, request):
        """GET /health: 200 while requests are taken on, else 503."""
        thread, last = self.thread, self.thread.meters.last_round
        status = "stopping" if thread.is_stopping else "ok" if thread.batch else "loading"
        if thread.error or (thread.batch and not thread.is_alive):
            status = "failed"
        age = None if last is None else round(time.monotonic() - last, 3)
        told = {"status": status, "is_loaded": thread.batch is not None, "last_round_s_ago": age,
                "busy": thread.busy}  # fmt: skip
        return JSONResponse(told, 200 if status == "ok" else 503)

    async def metrics(self, request):
        """GET /metrics."""
        thread = self.thread
        slots = thread.batch.slots if thread.batch else 0
        text = thread.meters.text(slots, thread.busy)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


class Completions:
    """An ASGI endpoint that answers a prompt. read: body -> Asked. form: answers.Chat or answers.Text."""

    def __init__(self, service, read, form):
        self._service, self._read, self._form = service, read, form

    async def __call__(self, scope, receive, send):
        request, thread = Request(scope, receive, send), self._service.thread
        how = "cancelled"
        try:
            self._service.check_key(request)
            asked = self._read(await json_body(request))
            with thread.place(asked.answers) as place:
                facts = self._service.facts(asked.model)
                how = (
                    await unless_gone(receive, self._answer(scope, receive, send, place, asked, facts)) or how
                )
        except ClientDisconnect:
            pass
        except Refusal as refusal:
            how = "failed" if refusal.status == 500 else "refused"
            raise
        except Exception:
            how = "failed"
            raise
        finally:
            thread.meters.end(how)

    async def _answer(self, scope, receive, send, place, asked, facts):
        """Answer, and return how the request ended."""
        tickets = await place.submit(asked)
        tokenizer = self._service.thread.batch.engine.tokenizer
        reply = answers.Reply(self._form, tokenizer, facts, tickets[0].handle)
        if asked.is_streamed:
            return await self._stream(send, tickets, reply, asked.tells_usage)
        found = await asyncio.gather(*map(whole, tickets))
        for rounds in found:
            reply.count(rounds)
        await JSONResponse(reply.whole(found))(scope, receive, send)
        return "completed"

    async def _stream(self, send, tickets, reply, tells_usage):
        """An event a round. What goes wrong once the first one is sent is an event too."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        how = "completed"
        try:
            async with aclosing(events(tickets, reply, tells_usage)) as stream:
                async for data in stream:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Refusal as refusal:
            how = "failed"
            last = answers.event(refusal.to_json())
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return how


async def whole(ticket):
    """All rounds of an answer. Errors: Refusal."""
    rounds = []
    while not rounds or rounds[-1].finish_reason is None:
        rounds.append(taken(await ticket.items.get()))
    return rounds


def taken(item):
    """An item of a ticket that is a Round. Errors: Refusal, where it is one."""
    if isinstance(item, Refusal):
        raise item
    return item


async def events(tickets, reply, tells_usage):
    """The bytes of a stream: the rounds of all answers as they come. Errors: Refusal."""
    begun, left = set(), len(tickets)
    async with aclosing(rounds_of(tickets)) as items:
        async for index, found in items:
            if found is None:
                yield b": still here\n\n"
                continue
            reply.count([found])
            left -= found.finish_reason is not None
            if found.text or found.finish_reason or found.logprobs or index not in begun:
                piece = reply.piece(index, found, index not in begun)
                yield answers.event(reply.chunk([piece], None if left or tells_usage else reply.usage))
            begun.add(index)
    if tells_usage:
        yield answers.event(reply.chunk([], reply.usage))
    yield b"data: [DONE]\n\n"


async def rounds_of(tickets):
    """(index, Round) of all answers until each has ended; (None, None) where nothing came for a while."""
    waits = {asyncio.ensure_future(ticket.items.get()): i for i, ticket in enumerate(tickets)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None, None
            for task in sorted(done, key=waits.get):
                index = waits.pop(task)
                found = taken(task.result())
                if found.finish_reason is None:
                    waits[asyncio.ensure_future(tickets[index].items.get())] = index
                yield index, found
    finally:
        for task in waits:
            task.cancel()


async def unless_gone(receive, work):
    """What a coroutine returns; None where the client left before, and then it was cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive):
    """Return when the client leaves. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def json_body(request):
    """The body of a request. Errors: Refusal of another type, of too many bytes, and of what is not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page in a browser can send other types to localhost, and not this one
        raise Refusal(415, f"the body's type is {kind!r}; send Content-Type: application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MOST_BYTES:
            raise Refusal(413, f"the body has more than {MOST_BYTES} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {str(error)[:200]}") from None


async def refused(request, refusal):
    """A Refusal as a response."""
    return JSONResponse(refusal.to_json(), refusal.status, headers=refusal.headers)


async def not_routed(request, error):
    """An address that is not here, or not with this method, as a response."""
    return await refused(
        request, Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    )


async def broken(request, error):
    """A mistake of ours as a response; the server logs it."""
    return await refused(request, Refusal(500, "the server made a mistake; its log says which"))
