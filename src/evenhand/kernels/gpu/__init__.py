"""A training step in Triton: static shapes, no host synchronisation, bitwise deterministic.

Buffers have fixed sizes, because a recorded graph has fixed addresses. None can overflow:

| buffer | size | why it suffices |
|---|---|---|
| columns of a step | M + B | one for a sampled label, one for an example's own |
| slots of an example's positives | P | it has no more positives |
| kept labels of an example | k | `selection.kth_largest` selects no more, ties included |
| survivors | B | the whole batch at most |
| features of the survivors | `bags.entry_capacity` | see there; if it did not, NaN would show it |
| partial sums of long rows | entries / `entries.PIECE` | one a block |
| statistics, rates, keys | number of steps | one a step |

Places are counted in 32 bits where `training.gpu_step.MOST_ENTRIES` and `LARGEST_ROW` allow it, and
in 64 bits where the size of a table or a data set is involved.
"""
