"""Waiting for a condition on slow machines."""

import time


def eventually(condition):
    """Wait until the condition is true. Return False after a limit that is far longer than necessary."""
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.02)
    return False
