// The choice among the compiled forms of an update. To be included after `#pragma GCC target`, if there is one: what is
// inlined into it has the same instructions.
#pragma once

#include <type_traits>

#include "../element.h"

namespace swd {
namespace {

// Calls f(decay, from_grad) with the template arguments of `update_element` that these scalars ask for.
template <typename T, typename F>
SWD_INLINE auto by_kind(const Scalars<T>& s, const F& f) {
  const auto by_decay = [&](auto from_grad) SWD_INLINE_LAMBDA {
    if (s.cautious) return f(std::integral_constant<Decay, Decay::Cautious>{}, from_grad);
    if (s.l2 != 0) return f(std::integral_constant<Decay, Decay::L2>{}, from_grad);
    return f(std::integral_constant<Decay, Decay::Plain>{}, from_grad);
  };
  return s.from_grad ? by_decay(std::true_type{}) : by_decay(std::false_type{});
}

}  // namespace
}  // namespace swd
