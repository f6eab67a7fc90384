"""Jobs for the tests of compile_ahead: a module of its own, so that a worker imports nothing heavy."""

import os
import time


def work(job: str) -> str:
    """Succeed, fail, hang or crash, as the job says."""
    if job == "slow":
        time.sleep(60)
    if job == "crash":
        os._exit(1)
    return "" if job == "good" else f"no {job}"
