"""Models of other people's libraries train as on one device, or are refused in words that are stated here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from crowd import pictures, sequences
from crowd.torchvision_operators import declare
from penstock import PartitionError, verify
from scaffolding.models import Case

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # the warnings are theirs

CROWD = [*pictures.cases(), *sequences.cases()]
REFUSED: dict[str, str] = {}
"""By library and name: words of the refusal."""


@pytest.mark.parametrize(("library", "name", "make"), [pytest.param(*case, id="-".join(case[:2])) for case in CROWD])
def test_trains_as_on_one_device(library: str, name: str, make: Callable[[], Case], one_thread: None) -> None:
    declare()
    pytest.importorskip(library, reason=f"{library} comes with the extra zoo")
    torch.manual_seed(0)
    case = make()
    given = partial(verify, case.model, case.args, case.kwargs, target=case.target, loss_fn=case.loss)
    refusal = REFUSED.get(f"{library}-{name}")
    if refusal is not None:
        with pytest.raises(PartitionError, match=refusal):
            given(ranks=4, microbatches=4)
        return
    given(ranks=4, schedule="gpipe", microbatches=4).check()


def test_there_are_sixty_of_them() -> None:
    assert len(CROWD) >= 60
