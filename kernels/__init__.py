"""open_ops(backend) -> Ops (public as minidflash.ops); finds out what this machine has, lazily."""


def open_ops(name="auto", activations=None, **options):
    """Kernels of one backend.

    name: "auto", "oracle" or "numba". activations: "f32" or "bf16"; default f32 on the CPU. options: the backend's
    own (numba: threads). Errors: UserError for an unknown or unavailable backend. Source: engine.md 2-3.
    """
    from minidflash.errors import UserError

    from .ops import Ops

    if name == "auto":
        name = "numba"
    if activations not in (None, "f32", "bf16"):
        raise UserError(f"activations {activations!r} not known", "use f32 or bf16")
    if name == "oracle":
        from .host import OracleBackend

        return Ops(OracleBackend(activations or "f32", **options))
    if name == "numba":
        try:
            from .cpu import NumbaBackend
        except ImportError as error:
            raise UserError(
                f"the numba backend cannot start: {error}", "pip install numba", code=3
            ) from error
        return Ops(NumbaBackend(activations or "f32", **options))
    raise UserError(f"backend {name!r} not known", "use auto, oracle or numba")
