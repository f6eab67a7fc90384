"""Print a failure the moment it happens, to a file; also under xdist (reports arrive at the controller)."""
import os
def pytest_runtest_logreport(report):
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        with open(os.environ.get("INSTANT", "/tmp/instant.txt"), "a") as f:
            f.write(f"FAILED {report.nodeid} [{report.when}]\n{str(report.longrepr)[-2500:]}\n\n")
