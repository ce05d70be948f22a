"""Runs the part of the long tests whose turn it is: each commit to the main branch runs the next part.

`make test-part` runs it in CI, which has an hour in all. The size of a part is estimated from how long its tests took
before; nothing is cut off.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CPU_SECONDS = {
    "tests/distributed/test_support_matrix.py": 430,
    "tests/test_zoo_matrix.py": 435,
    "tests/distributed/test_bad_network.py": 420,
    "tests/distributed/test_gloo.py": 15,
    "tests/verification/test_proof_table.py": 120,
    "tests/distributed/test_checkpoint.py": 20,
    "tests/distributed/test_nccl_rules.py": 105,
    "tests/simulate/search/test_published_found.py": 240,
    "tests/test_transformers_zoo.py": 110,
    "tests/distributed/test_changing.py": 25,
    "tests/distributed/test_windows.py": 45,
    "tests/distributed/test_staged.py": 45,
    "tests/distributed/test_mesh.py": 55,
    "tests/test_gpu_run.py": 430,
    "tests/distributed/test_recorded_ranks.py": 10,
    "tests/cli/test_run.py": 5,
    "tests/cli/test_run_crashes.py": 20,
    "tests/cli/test_fabric.py": 15,
    "tests/distributed/test_host_waits_between.py": 25,
    "tests/distributed/test_sharded.py": 20,
    "tests/distributed/test_weights.py": 5,
    "tests/distributed/test_saving.py": 10,
    "tests/cli/test_shut_folders.py": 5,
    "tests/integrations/test_lightning.py": 45,
    "tests/integrations/test_trainer.py": 20,
    "tests/verification/blame/test_blame.py": 105,
    "tests/distributed/test_waiting.py": 35,
    "tests/distributed/test_falling.py": 75,
    "tests/report/studio/test_studio_page.py": 35,
    "tests/report/studio/test_runs_page.py": 5,
    "tests/report/studio/test_opened_page.py": 10,
    "tests/cli/test_demo.py": 25,
    "tests/cli/test_init.py": 20,
    "tests/documents/test_shown_output.py": 15,
    "tests/cli/test_run_hosts.py": 40,
    "tests/distributed/test_restart.py": 60,
    "tests/distributed/test_recompute_ranks.py": 55,
    "tests/distributed/test_cuts.py": 5,
    "tests/network/fabric/test_emulation.py": 20,
    "tests/plan/explain/test_whole_steps.py": 20,
    "tests/runtime/split_backward/test_split_schedules.py": 15,
    "tests/cli/test_verify.py": 30,
    "tests/test_examples.py": 55,
    "tests/runtime/test_precision.py": 10,
    "tests/network/fabric/test_fabric_statistics.py": 5,
    "tests/partition/record/test_op_work.py": 5,
    "tests/pipe/test_links.py": 5,
    "tests/runtime/execute/test_local_run.py": 5,
    "tests/runtime/features/test_compile.py": 20,
    "tests/test_peft.py": 25,
    "tests/network/fabric/traffic/test_workloads.py": 5,
    "tests/distributed/test_kinds_ranks.py": 15,
    "tests/runtime/step/test_kinds.py": 20,
    "tests/test_layer_drop.py": 65,
    "tests/partition/record/test_same_again.py": 25,
    "tests/test_correctness_rows.py": 15,
    "tests/cli/test_plan.py": 10,
    "tests/cli/test_plan_to_run.py": 45,
    "tests/runtime/split_backward/test_compiled_products.py": 15,
    "tests/integrations/test_loggers.py": 5,
    "tests/documents/test_site.py": 35,
}
"""CPU seconds that the long tests of a file take, over all processes."""

IN_ALL_ONLY = {
    "tests/crowd/test_crowd.py",
    "tests/network/fabric/test_bad_links.py",
    "tests/network/fabric/test_fabric_hosts.py",
    "tests/network/test_namespaces.py",
}
"""Files whose long tests are in no part: longer than any, or with the machine to themselves."""

MAX = 600
"""The most CPU seconds in a part: five to six minutes on two processors."""


def parts(seconds: Mapping[str, int], most: int) -> list[list[str]]:
    """Divides the files into parts of at most `most` seconds each, placing the longest files first."""
    found: list[list[str]] = []
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        if seconds[name] > most:
            raise ValueError(f"{name} takes {seconds[name]} s, and a part {most} s at most: divide its tests")
        for part in found:
            if sum(seconds[other] for other in part) + seconds[name] <= most:
                part.append(name)
                break
        else:
            found.append([name])
    return found


def main(options: list[str]) -> int:
    """Runs the part with pytest and returns its exit status. `options` are pytest's."""
    root = Path(__file__).parents[2]
    count = subprocess.run(
        ["git", "rev-list", "--count", "--first-parent", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    every = parts(CPU_SECONDS, MAX)
    turn = int(count.stdout) % len(every)
    print(f"long tests, part {turn + 1} of {len(every)}: {' '.join(every[turn])}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "long and not alone", *options, *every[turn]]
    return subprocess.run(command, cwd=root, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
