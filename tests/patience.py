"""To wait for what must come true, however slow the machine is."""

import time


def eventually(condition):
    """Whether the condition comes true. No test of timing: the limit is there so that a failure ends at all."""
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.02)
    return False
