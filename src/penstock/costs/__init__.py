"""What stages and links cost, from numbers, a file or a profile, for any schedule to be simulated with.

In come the numbers of `StageCost` and `LinkCost`, a file of costs or links (`read_costs`, `read_links`), or the
units of a profile (`units_of`). Out come `Costs`, which every schedule takes its own from, and an `Outcome`: the
schedule's timeline with these costs, and the figures that follow from it. Does not load torch.

>>> from penstock.schedule import generate
>>> from penstock.simulate import LinkCost, StageCost
>>> costs = Costs(StageCost(1.0, 1.0, 1.0), LinkCost(0.0))
>>> Outcome.simulated(generate("1f1b", ranks=2, microbatches=4), costs).timeline.makespan_seconds
15.0
"""

from penstock.costs.costs import WORK, Costs
from penstock.costs.files import read_costs, read_links
from penstock.costs.links import MeasuredLinks, links_in
from penstock.costs.outcome import Outcome, with_one_model
from penstock.costs.units import units_of

__all__ = [
    "WORK",
    "Costs",
    "MeasuredLinks",
    "Outcome",
    "links_in",
    "read_costs",
    "read_links",
    "units_of",
    "with_one_model",
]
