"""What a refusal looks like."""

import pytest

from minidflash.errors import UserError


def refused(do, *words):
    """What `do` is refused with, in one line that has all the words."""
    with pytest.raises(UserError) as error:
        do()
    line = f"{error.value} {error.value.hint}"
    assert error.value.code == 2 and "\n" not in str(error.value), line
    assert all(word in line for word in words), f"{words}: {line}"
