"""Scripts in forks end as in an interpreter: with its statuses and words, and with what `atexit` has registered."""

import pytest

from scaffolding.warm_scripts import lines_of_script

pytestmark = pytest.mark.distributed


def test_a_script_that_fails_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^1\nbegun\n.*Traceback .*ValueError: a reason"):
        lines_of_script("print('begun'); raise ValueError('a reason')")
    with pytest.raises(AssertionError, match=r"^None\n"):
        lines_of_script("import signal; signal.pause()", seconds=0.5)
