"""Replicas by Ray Serve: a process a GPU, each with an engine, a batch and the application of its own.

    pip install 'minidflash[cuda,ray]'
    serve run minidflash.serve.ray_app:replicas replicas=8 gpus=1 slots=16 target=Qwen/Qwen3-8B \\
        drafter=z-lab/Qwen3-8B-DFlash-b16 ctx=8192

Ray's proxy spreads requests over replicas, passes streams on, and tells a replica when a client has left.
See replicas.md. Source: Ray Serve's HTTP guide.
"""

from ray import serve

# Whole numbers among the arguments, which a command line gives as texts.
NUMBERS = "ctx", "prefill_chunk", "block", "max_tokens"


def replicas(arguments):
    """The application that `serve run` deploys.

    arguments: {name: value}: replicas (default 1), gpus of each (1; 0: on the CPU), slots (8), max_waiting (64),
    key (none), block, verify, max_tokens, and keywords of `minidflash.load`.
    Returns a Ray Serve application. Errors: TypeError for an unknown keyword, once a replica loads.
    Source: sequences.md 10.
    """
    given = dict(arguments)
    count, gpus = int(given.pop("replicas", 1)), float(given.pop("gpus", 1))
    slots, waiting = int(given.pop("slots", 8)), int(given.pop("max_waiting", 64))
    given |= {name: int(given[name]) for name in NUMBERS if name in given}

    def build():
        return app_of(given, slots, waiting)

    deployment = serve.deployment(
        serve.ingress(build)(), name="minidflash", num_replicas=count, ray_actor_options={"num_gpus": gpus},
        max_ongoing_requests=slots + waiting + 1,  # one more, so that a client sees our 429 and not a queue
    )  # fmt: skip
    return deployment.bind()


def app_of(given, slots, waiting):
    """The ASGI application of one replica; the engine is loaded before the replica counts as ready."""
    import minidflash as md

    from .app import make_app

    own = {name: given.pop(name) for name in ("key", "block", "verify", "max_tokens") if name in given}
    batch = md.Batch(md.load(**given), slots, given.get("ctx"), own.get("block"), own.get("verify", "auto"))
    defaults = {"max_tokens": own["max_tokens"]} if "max_tokens" in own else None
    return make_app(lambda: batch, waiting, own.get("key"), defaults)
