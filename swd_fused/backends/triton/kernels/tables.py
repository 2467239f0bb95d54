"""What the kernels are told about tensors, segments, groups and programs: the columns of each table."""

from __future__ import annotations

import triton.language as tl

# Columns of `tensors` (int64).
PARAM_ADDRESS = tl.constexpr(0)
GRAD_ADDRESS = tl.constexpr(1)
EXP_AVG_ADDRESS = tl.constexpr(2)
EXP_AVG_SQ_ADDRESS = tl.constexpr(3)
MAX_EXP_AVG_SQ_ADDRESS = tl.constexpr(4)
MASTER_ADDRESS = tl.constexpr(5)
ALIGNED = tl.constexpr(6)
GROUP = tl.constexpr(7)
TENSOR_ID = tl.constexpr(8)
FIRST_NUMBER = tl.constexpr(9)  # of its elements, with the next two: see element_numbers.ElementNumbers.rows
ROW_LENGTH = tl.constexpr(10)
ROW_PITCH = tl.constexpr(11)
TENSOR_COLUMNS = tl.constexpr(12)

# Columns of what is known of a tensor's codes (int64), where any tensor's moments are kept in 8 bits. In memory these
# rows are before `tensors`, the first tensor's last: kernels that know nothing of codes need not know of them.
EXP_AVG_SCALES_ADDRESS = tl.constexpr(0)
EXP_AVG_SQ_SCALES_ADDRESS = tl.constexpr(1)
COLUMNS = tl.constexpr(2)
BLOCKS_PER_ROW = tl.constexpr(3)  # 0 if the tensor has no codes
FIRST_BLOCK = tl.constexpr(4)  # its number, with the next one: see eight_bit.BlockNumbers
BLOCK_PITCH = tl.constexpr(5)
CODEC_COLUMNS = tl.constexpr(6)

# Columns of `segments` (int64).
TENSOR = tl.constexpr(0)
START = tl.constexpr(1)
LENGTH = tl.constexpr(2)
SEGMENT_COLUMNS = tl.constexpr(3)

# Columns of `hyper` (float64), as schedule.Hyper has them.
LR = tl.constexpr(0)
BETA1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
EPS = tl.constexpr(3)
WEIGHT_DECAY = tl.constexpr(4)
MAX_DECAY = tl.constexpr(5)
SIGN = tl.constexpr(6)
DECOUPLED_DECAY = tl.constexpr(7)
L2 = tl.constexpr(8)
CORRECTS_BIAS = tl.constexpr(9)
HYPER_COLUMNS = tl.constexpr(10)

# Columns of `slots` (float64), a row for each program: what it adds to the sums between the passes, and what it makes
# of the totals.
GRAD_SUM = tl.constexpr(0)
CARRIED = tl.constexpr(1)
FRESH = tl.constexpr(2)
MAX_SUM = tl.constexpr(3)
MEAN = tl.constexpr(4)
GRAD_FACTOR = tl.constexpr(5)
SLOT_COLUMNS = tl.constexpr(6)

# Columns of `sums` (float64), a row for each segment: the sum of its second moments, and how many steps its tensor had
# taken when they were summed. If it has taken more since, somebody else has stepped the tensor.
SUM = tl.constexpr(0)
SUM_STEP = tl.constexpr(1)
SUM_COLUMNS = tl.constexpr(2)

# Columns of `limits` (float64): the number of elements, at least 1; max_grad_norm, infinite if nothing is clipped;
# whether steps with a norm that is not finite are skipped, 1 or 0; what the keys of stochastic rounding start from.
NUMEL = tl.constexpr(0)
MAX_GRAD_NORM = tl.constexpr(1)
SKIP_NONFINITE = tl.constexpr(2)
ROUNDING_START = tl.constexpr(3)

# Columns of `last` (float64): the sum of v^ as the step before left it, and the number of its elements.
LAST_SUM = tl.constexpr(0)
LAST_NUMEL = tl.constexpr(1)

# Columns of `results` (float64).
EXP_AVG_SQ_MEAN = tl.constexpr(0)
GRAD_NORM = tl.constexpr(1)
SKIPPED = tl.constexpr(2)
