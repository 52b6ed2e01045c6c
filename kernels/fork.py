"""What a forked process does not inherit from its parent: the threads of GNU OpenMP, a CUDA context (F101).

A child that uses them is killed by their runtime, hangs, or gets errors that say nothing of a fork.
"""

import os

from minidflash.errors import UserError

_started, _lost = set(), set()  # by this process; by the one that it was forked from

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _lost.update(_started))


def started(what):
    """Note that this process has started `what`, in words; returns it. Errors: as refuse_lost."""
    refuse_lost(what)
    _started.add(what)
    return what


def refuse_lost(what):
    """Errors: UserError, code 3, in a process that was forked after its parent had started `what`."""
    if what in _lost:
        raise UserError(
            f"this process was forked from one that had started {what}: that cannot be used after a fork",
            "start it with spawn, multiprocessing.get_context('spawn'), or load in the children only",
            code=3,
        )
