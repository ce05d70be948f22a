"""What each Python process of a job imports first that `penstock blame` starts: command.py puts it into PYTHONPATH."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

from penstock.blame.pipelining import Schedules
from penstock.blame.watch import FOLDER, watching

watch = watching()
if watch is not None:
    Schedules(watch)
    others = [folder for folder in sys.path if folder != os.environ[FOLDER]]
    own = PathFinder.find_spec("sitecustomize", others)  # the user's, as Python imports only one
    if own is not None and own.loader is not None:
        own.loader.exec_module(module_from_spec(own))
