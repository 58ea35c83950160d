"""The worker service: loads a model and executes the steps that a scheduler plans.

Threads of a parallel product sleep while they wait for one another instead of spinning. Alone on
the machine that costs nothing measurable; beside other busy processes it is about four times as
fast, since a spinning thread keeps the one it waits for off the processor. The OpenMP runtime reads
this when torch loads it, so it is set before anything here imports torch.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
