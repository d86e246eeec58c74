"""Layouts and tolerances of the gradient tests."""

from __future__ import annotations

# Float32 and another order of summation over at most a few hundred terms: seen 3e-7 to 8e-7. A token weight lost or
# counted twice shows at 1e-2 and above.
TOLERANCE = 1e-5
SP = ("parallel.sequence_parallel=true",)
CP = ("parallel.context=2",)  # the third degree counts processes: two that share a replica's sequences
