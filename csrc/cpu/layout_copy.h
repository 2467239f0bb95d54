// Copies between a tensor that lies in memory in any order and an array in the order of the walk.
#pragma once

#include <cstdint>

#include "operand.h"

namespace swd {

// Elements of `item_size` bytes, 2, 4 or 8: n of them from `begin` on in the order of the walk.
void copy_to_array(void* array, const void* tensor, int64_t item_size, const Positions& positions, int64_t begin,
                   int64_t n);
void copy_to_tensor(void* tensor, const void* array, int64_t item_size, const Positions& positions, int64_t begin,
                    int64_t n);

// How many elements of the walk to copy at once, so that a line of the cache is read once and not for a few elements
// each time. 1 if that is the same for any number.
int64_t elements_at_once(const Positions& positions, int64_t item_size);

}  // namespace swd
