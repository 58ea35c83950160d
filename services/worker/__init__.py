"""The worker service: loads a model and executes the steps that a scheduler plans.

Threads of a parallel product sleep while they wait for one another instead of spinning. Alone on
the machine that cost nothing measurable; beside another busy process some steps were several times
as fast, since a spinning thread keeps the one it waits for off the processor (figures, and where it
did not help: docs/performance.md). The OpenMP runtime reads this when torch loads it, so it is set
before anything here imports torch.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
