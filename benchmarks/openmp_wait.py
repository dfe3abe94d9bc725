"""What spinning OpenMP threads cost when another process wants a core: the same operations, both ways, side by side.

Runs child processes (spinning as by default, for a moment, and not at all) alone, and while one more process keeps a
core busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

CHILD = """
import json, time, torch
torch.set_num_threads(2)
hidden = torch.randn(944, 576).bfloat16(); weight = torch.randn(1536, 576).bfloat16()
def milliseconds(operation, times=40):
    for _ in range(5): operation()
    start = time.perf_counter()
    for _ in range(times): operation()
    return 1e3 * (time.perf_counter() - start) / times
print(json.dumps({"matrix product": milliseconds(lambda: hidden @ weight.T), "cast": milliseconds(hidden.float)}))
"""
POLICIES = {"spinning": {}, "short spin": {"GOMP_SPINCOUNT": "1000"}, "no spin": {"GOMP_SPINCOUNT": "0"}}


def main() -> None:
    """Print milliseconds per operation for every policy, with and without a busy neighbour."""
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    for busy in (False, True):
        neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
        try:
            for name, policy in POLICIES.items():
                output = subprocess.check_output([sys.executable, "-c", CHILD], env={**clean, **policy}, text=True)
                figures = ", ".join(f"{k} {v:.3f} ms" for k, v in json.loads(output).items())
                print(f"{'busy neighbour' if busy else 'alone':<15} {name:<10} {figures}")
        finally:
            if neighbour:
                neighbour.kill()
                neighbour.wait()


if __name__ == "__main__":
    main()
