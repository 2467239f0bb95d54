#include "huge_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace swd {

void advise_huge_pages(torch::stable::Tensor tensor) {
#if defined(MADV_HUGEPAGE)
  // Inward to whole huge pages: neighbours in the same heap are not ours to advise about.
  constexpr uintptr_t PAGE = uintptr_t{2} << 20;
  const uintptr_t start = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t end = start + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size();
  const uintptr_t first = (start + PAGE - 1) / PAGE * PAGE, last = end / PAGE * PAGE;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)tensor;
#endif
}

}  // namespace swd
