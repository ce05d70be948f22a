"""Checkpoints and files of weights, under the unsplit model's names: saved by one split, loaded by any.

save, finish, load, latest             a run's state, by `torch.distributed.checkpoint`; crashes leave the last good one
Generators                             Python's, numpy's and torch's global generators, to save along with it
export_safetensors, import_safetensors one file of weights that the unsplit model loads, a stage at a time
weights                                such a file, or a checkpoint, as the initialiser of a model on the meta device
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
