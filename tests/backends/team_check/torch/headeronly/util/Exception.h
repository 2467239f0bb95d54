#pragma once

#include <stdexcept>

#define STD_TORCH_CHECK(condition, ...) \
  if (!(condition)) throw std::runtime_error(#condition)
