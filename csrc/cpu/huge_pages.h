#pragma once

#include <torch/csrc/stable/tensor.h>

namespace swd {

// Asks the kernel to back a new tensor's memory with huge pages. Call it before the memory is first written.
// Where the system does not offer them nothing happens.
void advise_huge_pages(torch::stable::Tensor tensor);

}  // namespace swd
