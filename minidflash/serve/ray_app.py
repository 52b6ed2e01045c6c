"""Replicas by Ray Serve: a process a GPU, each with an engine, a batch and an application of its own. See
replicas.md. Source: Ray Serve's HTTP guide."""

NUMBERS = "ctx", "prefill_chunk", "block", "max_tokens"  # a command line gives them as texts


def replicas(arguments):
    """The application that `serve run minidflash.serve.ray_app:replicas NAME=VALUE ...` deploys.

    arguments: {name: value}: replicas (default 1), gpus of each (1; 0: on the CPU), slots (8), max_waiting
    (64), key (none), block, verify, max_tokens, and keywords of `minidflash.load`.
    Returns a Ray Serve application. Errors: of `load` and of Batch, once a replica begins; ImportError
    without Ray. Source: sequences.md 10.
    """
    from ray import serve

    given = dict(arguments)
    count, gpus = int(given.pop("replicas", 1)), float(given.pop("gpus", 1))
    slots, waiting = int(given.pop("slots", 8)), int(given.pop("max_waiting", 64))
    deployment = serve.deployment(
        serve.ingress(lambda: app_of(given, slots, waiting))(), name="minidflash", num_replicas=count,
        ray_actor_options={"num_gpus": gpus},
        max_ongoing_requests=slots + waiting + 8,  # more, so that who comes too many gets our 429 and /health
    )  # fmt: skip
    return deployment.bind()


def app_of(given, slots, waiting):
    """The ASGI application of one replica. Its engine is loaded when this returns, so that Ray sends nothing
    before. given, slots, waiting: as in `replicas`."""
    import minidflash as md

    from .app import make_app

    given = given | {name: int(given[name]) for name in NUMBERS if name in given}
    own = {name: given.pop(name) for name in ("key", "block", "verify", "max_tokens") if name in given}
    verify = own.get("verify", "auto")
    verify = verify if verify == "auto" else int(verify)
    batch = md.Batch(md.load(**given), slots, given.get("ctx"), own.get("block"), verify)
    defaults = {"max_tokens": own["max_tokens"]} if "max_tokens" in own else None
    return make_app(lambda: batch, waiting, own.get("key"), defaults)
