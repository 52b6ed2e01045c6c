"""Many clients of a server: most wait for their text, some leave, some send what is no request."""

import asyncio
import random
from collections import Counter

import httpx

from tests.served import LAW, PROMPT, events, text_of

PATH = "/v1/chat/completions"
GARBAGE = [b"", b"{", b"\xff\x00", b"[1, 2]", b'{"messages": 5}', b'{"messages": [], "tools": [1]}']


async def soak(url, texts, count, connections=8, leave=0.1, garbage=0.05, seed=0, max_tokens=24):
    """Send `count` requests over some connections.

    texts: {seed of a request: the text it must get}. max_tokens: of each. leave, garbage: shares of clients
    that leave, and of bodies that are no request. Returns a Counter of how requests went: completed, wrong,
    left, refused, and status N for what nobody asked for.
    """
    dice, how, todo = random.Random(seed), Counter(), list(range(count))
    limits = httpx.Limits(max_connections=connections)

    async def work(client):
        while todo:
            todo.pop()
            one, drawn = dice.choice(list(texts)), dice.random()
            if drawn < garbage:
                how[await send_garbage(client, dice)] += 1
            elif drawn < garbage + leave:
                how[await leave_early(client, dice, one)] += 1
            else:
                how[await ask(client, dice.random() < 0.5, one, texts[one], max_tokens)] += 1

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        await asyncio.gather(*[work(client) for _ in range(connections)])
    return how


def body_of(seed, max_tokens, is_streamed):
    """A request whose text the seed tells."""
    return {"messages": PROMPT, "max_tokens": max_tokens, "seed": seed, "stream": is_streamed} | LAW


async def ask(client, is_streamed, seed, text, max_tokens):
    """A client that waits for its text."""
    response = await client.post(PATH, json=body_of(seed, max_tokens, bool(is_streamed)))
    if response.status_code != 200:
        return f"status {response.status_code}"
    if is_streamed:
        found = events(response.text.split("\n\n"))
        is_right = found[-1] == "[DONE]" and text_of(found) == text
    else:
        is_right = response.json()["choices"][0]["message"]["content"] == text
    return "completed" if is_right else "wrong"


async def leave_early(client, dice, seed):
    """A client that leaves at a time of its own, before its long text is done."""
    try:
        async with asyncio.timeout(dice.uniform(0.001, 0.1)):
            await client.post(PATH, json=body_of(seed, 2000, dice.random() < 0.5))
    except TimeoutError:
        return "left"
    return "completed before it left"


async def send_garbage(client, dice):
    """A body that is no request."""
    response = await client.post(
        PATH, content=dice.choice(GARBAGE), headers={"Content-Type": "application/json"}
    )
    return "refused" if response.status_code == 400 else f"status {response.status_code}"
