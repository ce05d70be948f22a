"""Functions are taken apart and made again, also those that cannot be taken apart to the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock._base.closures import Closure, replace_functions


def of_itself() -> Callable[[int], int]:
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n > 1 else 1

    return factorial


def of_each_other() -> Callable[[int], int]:
    def even(n: int) -> int:
        return odd(n - 1) if n else 24

    def odd(n: int) -> int:
        return even(n - 1)

    return even


@pytest.mark.parametrize("make", [of_itself, of_each_other])
def test_a_function_that_closes_over_itself(make: Callable[[], Callable[[int], int]]) -> None:
    found = replace_functions(make())
    assert isinstance(found, Closure)
    ((cell,), *rest) = found.contents
    inner = cell.make(*cell.contents) if make is of_each_other else cell
    assert found.make((inner,), *rest)(4) == 24


def test_a_function_around_which_a_variable_has_no_value_yet_stays_as_it_is() -> None:
    def reads() -> int:
        return later

    assert replace_functions([reads])[0] is reads
    later = 3
    assert reads() == 3
    assert isinstance(replace_functions(reads), Closure)
