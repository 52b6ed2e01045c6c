"""`minidflash serve`: an OpenAI-compatible server until Ctrl-C or SIGTERM."""

import os
import signal
import socket
import sys

from ..errors import UserError
from .generate import open_engine, warn
from .terminal import say

LOCAL = "127.0.0.1", "localhost", "::1"


def serve(args, interrupt=None):
    """Run the subcommand. args: parsed flags. interrupt: unused, uvicorn has the signals.
    Returns the exit code."""
    try:
        from ..serve.app import make_app
        from ..serve.server import Server
    except ImportError as error:
        raise UserError(
            f"serving needs the package {error.name}", "pip install 'minidflash[serve]'", code=3
        ) from error
    key = key_of(args)
    listener = listen(args.host, args.port)
    where = f"http://{address_of(listener)}/v1"

    def on_open():
        thread = app.state.engine_thread
        if thread.error:
            server.should_exit = True
        elif not args.quiet:
            say(f"minidflash: serving {thread.batch.engine.target_name} at {where}")

    app = make_app(lambda: open_batch(args), args.max_waiting, key, {"max_tokens": args.max_tokens}, on_open)
    thread = app.state.engine_thread
    server = Server(app, thread, args.grace, args.verbose)
    if key is None and args.host not in LOCAL and not args.quiet:
        say(f"minidflash: whoever reaches {args.host} may use this server: --api-key K asks for a key")
    server.run(sockets=[listener])
    if thread.error:
        raise thread.error
    code = 130 if server.signal == signal.SIGINT else 0
    if thread.is_alive:  # it loads, and does not listen
        sys.stdout.flush()
        os._exit(code)
    return code


def open_batch(args):
    """The batch that the flags ask for. Errors: UserError."""
    from ..batch import Batch

    engine = open_engine(args)
    if engine.tokenizer is None:
        raise UserError("this checkpoint has no tokenizer.json, and clients send text",
                        "minidflash generate --tokens takes ids")  # fmt: skip
    warn(args, engine, args.block or 1)
    own = {"block": args.block, "verify": args.verify, "reuse": not args.no_reuse}
    return Batch(engine, slots=args.slots, ctx=args.ctx, **own)


def key_of(args):
    """The key that clients must send, or None. Errors: UserError for an empty one."""
    key = args.api_key if args.api_key is not None else os.environ.get("MINIDFLASH_API_KEY")
    if key is not None and not key.strip():
        raise UserError(
            "the key is empty, and would let everyone in", "leave out --api-key and MINIDFLASH_API_KEY"
        )
    return key


def listen(host, port):
    """A socket that listens. Errors: UserError code 3."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        hint = "--port N takes another, --port 0 a free one"
        reason = str(error.strerror or error).partition(" (while")[0]
        raise UserError(f"{host}, port {port}: {reason}", hint, code=3) from None


def address_of(listener):
    """HOST:PORT of a socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
