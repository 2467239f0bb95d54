// Walks all patterns of float32 masters: each comes back from its parameter and its remainder, and the parameter is the
// nearest bfloat16. Prints how many do not come back, how many NaNs are lost, how many parameters are not the nearest,
// and how many masters lie halfway between two parameters.
#include <cstdio>

#include "../../csrc/masters.h"

namespace {

bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

}  // namespace

int main() {
  uint64_t changed = 0, lost_nans = 0, far = 0, halfway = 0;
  for (uint32_t upper = 0; upper < 1u << 16; ++upper) {
    // Above the largest number comes the infinity, as far away as a next number would be.
    const uint32_t below = upper << 16, above = below + 0x10000u;
    uint32_t of_these[4] = {};
    for (uint32_t lower = 0; lower < 1u << 16; ++lower) {
      const uint32_t master = below + lower;
      const swd::SplitMaster<uint32_t> parts = swd::split_master<int32_t>(master);
      const uint32_t param = parts.param << 16;
      const uint32_t joined = swd::joined_master<int32_t, uint32_t>(parts.param, static_cast<int16_t>(parts.remainder));
      of_these[0] += !is_nan(master) & (joined != master);
      of_these[1] += is_nan(master) & !(is_nan(param) & is_nan(joined));
      of_these[2] += !is_nan(master) & (param != (lower < 0x8000u ? below : above));
      of_these[3] += !is_nan(master) & (lower == 0x8000u);
    }
    changed += of_these[0];
    lost_nans += of_these[1];
    far += of_these[2];
    halfway += of_these[3];
  }
  std::printf("%llu %llu %llu %llu\n", static_cast<unsigned long long>(changed),
              static_cast<unsigned long long>(lost_nans), static_cast<unsigned long long>(far),
              static_cast<unsigned long long>(halfway));
}
