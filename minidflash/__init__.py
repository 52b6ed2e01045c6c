"""minidflash: DFlash speculative decoding, small and exact. See README.md."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout kernels/ and weights/ lie beside this folder; in a wheel they lie inside it.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "kernels" / "table.py").is_file():
    __path__.append(str(_here.parent))

_PUBLIC = {
    "load": "engine", "Engine": "engine", "generate": "run", "stream": "run", "Result": "stats",
    "Round": "stats", "Chat": "conversation", "Stats": "stats", "Batch": "batch", "UserError": "errors",
    "ops": "kernels",
}  # fmt: skip
__all__ = list(_PUBLIC)


def __getattr__(name):
    """Public names load their module on first use, so that `import minidflash` imports nothing heavy."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'minidflash' has no attribute {name!r}")
    from importlib import import_module

    attribute = "open_ops" if name == "ops" else name
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), attribute)
