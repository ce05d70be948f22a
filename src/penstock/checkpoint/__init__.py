"""Checkpoints and weight files that use the unsplit model's names: whatever split saved them, any split can load them.

save, wait_for_save, load, latest      a run's state, by `torch.distributed.checkpoint`; crashes leave the last good one
RngState                               Python's, numpy's and torch's global generators, to save with the run
export_safetensors, import_safetensors one file of weights, which the unsplit model can load
init_from_weights                      initializes a model on the meta device from such a file, or from a checkpoint
"""

from penstock._base.lazy import find_old_names
from penstock.checkpoint.contents import Stateful
from penstock.checkpoint.export import export_checkpoint, export_safetensors
from penstock.checkpoint.folders import latest
from penstock.checkpoint.generators import RngState
from penstock.checkpoint.loading import Restored, load
from penstock.checkpoint.saving import save, wait_for_save
from penstock.checkpoint.weights import import_safetensors, init_from_weights

__all__ = [
    "Restored",
    "RngState",
    "Stateful",
    "export_checkpoint",
    "export_safetensors",
    "import_safetensors",
    "init_from_weights",
    "latest",
    "load",
    "save",
    "wait_for_save",
]

weights = init_from_weights  # until 0.2; hides the module of that name
__getattr__ = find_old_names(__name__)
