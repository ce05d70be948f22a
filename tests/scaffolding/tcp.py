"""The transport from `examples/transport_tcp.py`, under a name that every process of a test can import."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from penstock.runtime.transport import Endpoint, PointToPoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "transport_tcp.py"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("transport_tcp", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that threads find it
    spec.loader.exec_module(module)
    return module


EXAMPLES_OWN = _loaded()


def sockets(endpoint: Endpoint) -> PointToPoint:
    """A transport factory."""
    made: PointToPoint = EXAMPLES_OWN.Sockets(endpoint)
    return made
