"""What devices can do, by their vendors' figures, and what operations take on them. Does not load torch.

>>> device("h100").name
'NVIDIA H100 SXM 80GB'
"""

from penstock.costs.hardware.calibration import Measurement, calibrated
from penstock.costs.hardware.roofline import USUAL, Efficiency, Operation, operation_seconds, seconds_of
from penstock.costs.hardware.specs import DTYPES, Cable, Device, device, devices, reported_as

__all__ = [
    "DTYPES",
    "USUAL",
    "Cable",
    "Device",
    "Efficiency",
    "Measurement",
    "Operation",
    "calibrated",
    "device",
    "devices",
    "operation_seconds",
    "reported_as",
    "seconds_of",
]
