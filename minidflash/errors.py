"""What a user can cause, and the exit code it ends with."""


class UserError(Exception):
    """A mistake or a lack the user can mend. Message: what was found and what was needed, one line.

    hint: what to type next, or None. code: 2 wrong use or a refused checkpoint; 3 not possible here
    (a missing package, no GPU, no memory); 1 a check failed.
    """

    def __init__(self, message, hint=None, code=2):
        super().__init__(message)
        self.hint = hint
        self.code = code
