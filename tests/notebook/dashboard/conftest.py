import time

import pytest

from tests.notebook.dashboard.watched import FakeEngine, two_stages


@pytest.fixture
def engine():
    """A fake engine of two stages with one rank each."""
    made = FakeEngine(two_stages(2))
    yield made
    made.close()


@pytest.fixture
def until():
    """Wait until a predicate holds; what it gave."""

    def wait(predicate, seconds=10.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = predicate()
            if found:
                return found
            time.sleep(0.01)
        pytest.fail(f"not within {seconds} s")
        return None

    return wait
