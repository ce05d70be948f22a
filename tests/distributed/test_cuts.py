"""Where ranks would cut at different places, all cut where the first one does."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from distributed.cuts_jobs import cuts, model
from distributed.ranks import Ranks
from small import batch

pytestmark = pytest.mark.distributed


def test_all_ranks_cut_where_the_first_one_does(ranks2: Ranks) -> None:
    (first, here, loss), (second, there, other_loss) = ranks2.run(cuts)
    assert first != second
    assert here == there == first
    x, y = batch(4)
    assert loss == other_loss == pytest.approx(F.mse_loss(model(0)(x), y).item())
