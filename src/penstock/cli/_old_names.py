"""Former names of commands and options: accepted until 0.2, and not shown in `--help`."""

from __future__ import annotations

from collections.abc import Mapping

OLD_COMMANDS = {"show": "draw"}

OLD_OPTIONS = {
    "action-seconds": "action-overhead",
    "between-hosts": "inter-host-link",
    "budget-seconds": "time-limit",
    "chunks": "stages-per-rank",
    "comm": "link-latency",
    "comms": "with-messages",
    "global-batch": "global-batch-size",
    "gradient-dtype": "grad-dtype",
    "host-link": "offload-link",
    "leaves": "leaf-modules",
    "like": "replay",
    "link-of": "link-for",
    "no-whole-batch": "no-full-batch",
    "op": "reduce-op",
    "opens": "split-inside",
    "per-host": "devices-per-host",
    "rows": "microbatch-size",
    "search": "search-time",
    "sequence": "seq-length",
    "whole-batch": "full-batch",
}
"""In every command that has the new name."""

OLD_OPTIONS_OF = {
    "profile": {"json": "out"},
    "search": {"csv": "out", "memory-limit": "activation-limit", "seconds": "time-limit"},
}
"""In one command; elsewhere the old name is another option."""


def old_options(command: str | None) -> Mapping[str, str]:
    """Return the options of a command by their former names, both without hyphens in front."""
    return OLD_OPTIONS | OLD_OPTIONS_OF.get(command or "", {})
