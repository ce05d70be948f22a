"""What devices can do, by their vendors' figures, and what operations take on them. Does not load torch.

>>> device("h100").name
'NVIDIA H100 SXM 80GB'
"""

from penstock._base.lazy import find_old_names
from penstock.costs.hardware.calibration import Measurement, calibrate
from penstock.costs.hardware.device_spec import (
    DTYPES,
    DeviceSpec,
    Interconnect,
    device,
    device_by_reported_name,
    devices,
)
from penstock.costs.hardware.roofline import DEFAULT_EFFICIENCY, Efficiency, Operation, operation_seconds, seconds_of

__all__ = [
    "DEFAULT_EFFICIENCY",
    "DTYPES",
    "DeviceSpec",
    "Efficiency",
    "Interconnect",
    "Measurement",
    "Operation",
    "calibrate",
    "device",
    "device_by_reported_name",
    "devices",
    "operation_seconds",
    "seconds_of",
]

__getattr__ = find_old_names(__name__)
