# SPDX-License-Identifier: Apache-2.0
"""The error of whatever is stored and not what it was."""


class IndexDamagedError(ValueError):
    """An index, or a file of one, is not what it should be; it must not be searched."""


def require(condition: bool, message: str) -> None:
    """Raises IndexDamagedError unless the condition holds."""
    if not condition:
        raise IndexDamagedError(message)
