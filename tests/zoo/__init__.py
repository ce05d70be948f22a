"""The zoo: small models of every kind that Penstock promises to train, unedited. `ZOO` has them by name."""

from zoo.entry import MICROBATCHES, ROWS, Entry
from zoo.library import LIBRARY
from zoo.networks import NETWORKS
from zoo.pipelining import PIPELINING

__all__ = ["MICROBATCHES", "ROWS", "ZOO", "Entry"]

ZOO = {entry.name: entry for entry in (*LIBRARY, *NETWORKS, *PIPELINING)}
