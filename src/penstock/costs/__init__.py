"""What units, stages, links and devices cost, and where to cut so that the dearest stage costs least.

`profile.py` says what each unit of a model costs, measured or estimated (`estimate.py`, with `hardware/`: what devices
do by their vendors' figures), `sizes.py` what it costs with other microbatches, `cuts.py` where to cut,
`stage_costs.py` what stages cost then. `costs.py` takes them, or numbers, or a file, for a schedule to be simulated
with; `outcome.py` is that schedule's timeline, and the figures that follow from it. Does not load torch.

>>> from penstock.costs import Costs, CutProblem, Outcome, best_cuts
>>> from penstock.schedule import generate
>>> from penstock.simulate import LinkCost, StageCost
>>> costs = Costs(StageCost(1.0, 1.0, 1.0), LinkCost(0.0))
>>> Outcome.simulated(generate("1f1b", ranks=2, microbatches=4), costs).timeline.makespan_seconds
15.0
>>> best_cuts(CutProblem(seconds=[1.0, 1.0, 1.0, 3.0]), stages=2)
[0, 3]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._base.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.costs.costs import WORK as WORK
    from penstock.costs.costs import Costs as Costs
    from penstock.costs.cuts import CutProblem as CutProblem
    from penstock.costs.cuts import best_cuts as best_cuts
    from penstock.costs.cuts import stage_bytes as stage_bytes
    from penstock.costs.cuts import stage_loads as stage_loads
    from penstock.costs.estimate import estimate as estimate
    from penstock.costs.estimate import fit_efficiency as fit_efficiency
    from penstock.costs.files import read_costs as read_costs
    from penstock.costs.files import read_links as read_links
    from penstock.costs.links import MeasuredLinks as MeasuredLinks
    from penstock.costs.links import links_in as links_in
    from penstock.costs.outcome import Outcome as Outcome
    from penstock.costs.outcome import with_one_model as with_one_model
    from penstock.costs.profile import OPTIMIZER_VALUES as OPTIMIZER_VALUES
    from penstock.costs.profile import SPLIT_SECONDS as SPLIT_SECONDS
    from penstock.costs.profile import MeasuredLink as MeasuredLink
    from penstock.costs.profile import ModelFingerprint as ModelFingerprint
    from penstock.costs.profile import OpCounts as OpCounts
    from penstock.costs.profile import Profile as Profile
    from penstock.costs.profile import Tied as Tied
    from penstock.costs.profile import UnitCost as UnitCost
    from penstock.costs.profile import first_difference as first_difference
    from penstock.costs.profile import kept_bytes as kept_bytes
    from penstock.costs.profile import read_profile as read_profile
    from penstock.costs.profile import tied_bytes_overcount as tied_bytes_overcount
    from penstock.costs.profile import ties_of as ties_of
    from penstock.costs.sizes import units_of as units_of
    from penstock.costs.sizes import variation as variation

_HOMES = {
    "costs": "WORK Costs",
    "cuts": "CutProblem best_cuts stage_bytes stage_loads",
    "sizes": "units_of variation",
    "estimate": "estimate fit_efficiency",
    "files": "read_costs read_links",
    "links": "MeasuredLinks links_in",
    "outcome": "Outcome with_one_model",
    "profile": (
        "OPTIMIZER_VALUES SPLIT_SECONDS ModelFingerprint MeasuredLink OpCounts Profile Tied UnitCost "
        "tied_bytes_overcount first_difference kept_bytes read_profile ties_of"
    ),
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOMES, {"hardware"})
