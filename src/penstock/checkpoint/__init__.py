"""Checkpoints and weight files that use the unsplit model's names: whatever split saved them, any split can load them.

save, finish, load, latest             a run's state, by `torch.distributed.checkpoint`; crashes leave the last good one
Generators                             Python's, numpy's and torch's global generators, to save with the run
export_safetensors, import_safetensors one file of weights, which the unsplit model can load
weights                                initializes a model on the meta device from such a file, or from a checkpoint
"""

from penstock.checkpoint.contents import Stateful
from penstock.checkpoint.export import export_checkpoint, export_safetensors
from penstock.checkpoint.folders import latest
from penstock.checkpoint.generators import Generators
from penstock.checkpoint.loading import Restored, load
from penstock.checkpoint.saving import finish, save
from penstock.checkpoint.weights import import_safetensors, weights

__all__ = [
    "Generators",
    "Restored",
    "Stateful",
    "export_checkpoint",
    "export_safetensors",
    "finish",
    "import_safetensors",
    "latest",
    "load",
    "save",
    "weights",
]
