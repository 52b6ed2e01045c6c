"""open_ops(backend) -> Ops (public as minidflash.ops); finds out what this machine has, lazily."""

from functools import cache

MOST_THREADS = 1024  # that NUMBA_NUM_THREADS may ask for where there are fewer cores


def open_ops(name="auto", activations=None, device=0, **options):
    """Kernels of one backend.

    name: "auto" (cuda where it runs, else numba), "oracle", "numba", "emulate" or "cuda". activations: "f32"
    or "bf16"; default bf16 on cuda, else f32. device: which GPU. options: the backend's own (numba: threads;
    emulate: seed, sms; cuda: graph). Errors: UserError for an unknown or unavailable backend.
    Source: engine.md 2-3.
    """
    from minidflash.errors import UserError

    from .ops import Ops

    if activations not in (None, "f32", "bf16"):
        raise UserError(f"activations {activations!r} not known", "use f32 or bf16")
    if name not in ("auto", "oracle", "numba", "emulate", "cuda"):
        raise UserError(f"backend {name!r} not known", "use auto, oracle, numba, emulate or cuda")
    if name == "cuda" or (name == "auto" and has_cuda()):
        from .gpu.cuda import CudaBackend

        return Ops(CudaBackend(activations or "bf16", device, **options))
    if device:
        raise UserError(
            f"device {device}: only GPUs are counted, and {name} is the CPU", "leave out --device"
        )
    if name == "oracle":
        from .host import OracleBackend

        return Ops(OracleBackend(activations or "f32", **options))
    if name == "emulate":
        from .gpu import EmulateBackend

        return Ops(EmulateBackend(activations or "f32", **options))
    check_threads()
    try:
        from .cpu import NumbaBackend
    except ImportError as error:
        raise UserError(f"the numba backend cannot start: {error}", "pip install numba", code=3) from error
    return Ops(NumbaBackend(activations or "f32", **options))


def check_threads():
    """Refuse a NUMBA_NUM_THREADS that breaks Numba's import or its threads' start.
    Errors: UserError (F106)."""
    import os

    from minidflash.errors import UserError

    try:
        count = int(os.environ.get("NUMBA_NUM_THREADS") or 1)
    except ValueError:  # Numba says so itself and takes all cores
        return
    most = max(MOST_THREADS, os.cpu_count() or 1)
    if not 1 <= count <= most:
        raise UserError(
            f"NUMBA_NUM_THREADS is {count}, need a whole number from 1 to {most}",
            "unset it: Numba then takes all cores",
            code=3,
        )


@cache
def has_cuda():
    """Whether the cuda backend runs here: its packages are installed and a supported GPU answers."""
    from importlib.util import find_spec

    from minidflash.errors import UserError

    if not (find_spec("cupy") and find_spec("cuda")):
        return False
    from .launch import CudaDevice

    try:
        CudaDevice()
    except UserError:
        return False
    return True
