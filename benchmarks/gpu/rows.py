"""What becomes of a case."""

from __future__ import annotations

from typing import Any

from cases.case import Case, Setting, UnsupportedError

Row = dict[str, Any]
"""What became of a case: its name, part, status, what it says, seconds, and what it found.

Status: "ok"; "measured": it has no right or wrong; "failed": it is not as it should be; "raised"; "crashed": its
process ended without a result; "timed out"; "skipped": this machine cannot show it; "cut off": the time for all of them
was up while it ran; "not run": before it began.
"""

DONE = ("ok", "measured")
BAD = ("failed", "raised", "crashed", "timed out")
UNFINISHED = ("cut off", "not run")
LOGGED = (*BAD, "cut off")
TIME_WAS_UP = "the time was up"

MAX_CHARACTERS = 500
LOG_CHARACTERS = 3000


def row(case: Case, status: str, says: str, seconds: float, **more: Any) -> Row:
    says = " ".join(says.split())[:MAX_CHARACTERS]
    return {"name": case.name, "part": case.part, "status": status, "says": says, "seconds": round(seconds, 1), **more}


def outcome(case: Case, setting: Setting) -> Row:
    """Runs a case here, and says what it found: `status`, `says` and `found` of its row."""
    try:
        found = case.run(setting)
        status = "measured" if "ok" not in found else "ok" if found["ok"] else "failed"
        reached = {"reached": found["reached"]} if "reached" in found else {}
        return {"status": status, "says": found["says"], "found": found, **reached}
    except UnsupportedError as reason:
        return {"status": "skipped", "says": str(reason), "found": {}}
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"status": "raised", "says": f"{type(error).__name__}: {error}", "found": {}}
