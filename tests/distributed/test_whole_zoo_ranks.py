"""All of the zoo in real processes."""

from __future__ import annotations

import pytest
from test_zoo_ranks import RUN, TRANSPORTS, assert_proven, some_cells

from scaffolding.ranks import Ranks
from zoo import ZOO

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore"), pytest.mark.long]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("first", range(0, len(RUN), 5))
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model(ranks: int, first: int, transport: str, request: pytest.FixtureRequest) -> None:
    pool: Ranks = request.getfixturevalue(f"ranks{ranks}")
    assert_proven(pool, some_cells(list(ZOO), ranks, first), transport)
