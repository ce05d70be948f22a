"""What Penstock says of a call that it refuses, as text, which the ranks of a pool can return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock import PenstockError, Pipeline, RankFailedError


def refusal_of(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The error's kind and text; nothing if the call is not refused. A pipeline that it makes is closed.

    That another rank has failed is no refusal, and is raised.
    """
    try:
        made = call(*args, **options)
    except RankFailedError:
        raise
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(made, Pipeline):
        made.close()
    return ""
