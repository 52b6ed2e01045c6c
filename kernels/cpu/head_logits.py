"""head_logits: see head.py, which shares its matrix product."""

from .head import head_logits

__all__ = ["head_logits"]
