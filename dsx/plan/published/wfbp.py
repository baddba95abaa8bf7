"""Data parallel in buckets of layers, sent while the backward goes on, each with its start-up.

Source: WFBP (Poseidon, arXiv:1706.03292) with buckets as in MG-WFBP (arXiv:1811.11141): a bucket's
all-reduce begins when its last gradient is there and the one before has ended, takes the latency
and its bytes, and the next step begins when all have ended. ASC-WFBP lets start-ups of several
all-reduces pass at once, so the line is never idle for them: that is a latency once, and layers as
they come, which is `data_parallel` of dag.py. The published program, which also searches for what
to merge, cannot do better than that if simultaneous transfers share the line's rate. It has done
better where they were many: DreamDDP's Table 1 has 5.38 s for GPT-2 on 32 workers, which is 8.03 s
by this model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsx.plan.published.scenario import Scenario

Array = NDArray[np.float64]


def bucketed_step_seconds(scenario: Scenario, bits_per_second: Array) -> Array:
    """Return a step of WFBP, per bandwidth; as many terms as buckets."""
    compute, wire = scenario.compute, scenario.wire
    sent = scenario.bits_per_round / bits_per_second + scenario.codec_seconds
    is_free = np.zeros_like(bits_per_second)  # from the beginning of the backward
    for bucket in scenario.fragments:
        first = min(bucket)  # the last of its gradients
        nodes = 2 * (compute.layers - first) - (first == 0)
        share = len(bucket) / compute.layers
        begins = np.maximum(is_free, nodes * compute.node_seconds)
        is_free = begins + wire.latency_seconds + share * sent
    return compute.layers * compute.node_seconds + is_free
