// Compares the updates of moments in 8 bits by each instruction set that this machine has. Prints one line for each.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../csrc/cpu/coded_blocks.h"

using namespace swd;

namespace {

constexpr int64_t ROWS = 5;

// A matrix. Behind its last element lies another one, which no update may touch.
struct Run {
  int64_t columns, n = ROWS * columns;
  std::vector<float> param, grad, maxima, scales, root_scales;
  std::vector<int8_t> exp_avg;
  std::vector<uint8_t> root;
  double sum = 0, grad_sum = 0;

  explicit Run(int64_t columns)
      : columns(columns),
        scales(ROWS * blocks_of_row() + 1, 7.0f),
        root_scales(ROWS * blocks_of_row() + 1, 7.0f),
        exp_avg(n + 1),
        root(n + 1) {
    for (auto* values : {&scales, &root_scales}) std::fill(values->begin(), values->end() - 1, 0.0f);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* values : {&param, &grad, &maxima}) {
      for (int64_t i = 0; i < n + 1; ++i) values->push_back(normal(random) * (values == &param ? 1 : 0.01f));
    }
    for (float& x : maxima) x *= x;
    behind = {param[n], maxima[n]};
  }

  int64_t blocks_of_row() const { return (columns + CODE_BLOCK - 1) / CODE_BLOCK; }
  // Rows are numbered with a gap, as those of a shard are.
  BlockCursor cursor(int64_t first_block) const { return {columns, 0, first_block, blocks_of_row() + 3}; }
  bool is_untouched_behind() const {
    return param[n] == behind[0] && maxima[n] == behind[1] && exp_avg[n] == 0 && root[n] == 0 && scales.back() == 7 &&
           root_scales.back() == 7;
  }
  std::vector<float> behind;

  void step(UpdateBlocks& update, bool amsgrad, Decay decay, bool from_grad, int64_t first_block) {
    const float l2 = decay == Decay::L2 ? 0.1f : 0, slope = from_grad ? -0.1f : 0.1f;
    const bool cautious = decay == Decay::Cautious;
    const Scalars<float> scalars{1, l2, slope, 0.99f, 0.01f, 1.5f, 1e-8f, 0.999f, 1e-3f, from_grad, cautious};
    const CodedBlocks blocks{exp_avg.data(), root.data(), scales.data(), root_scales.data()};
    const UpdateSums sums = update(param.data(), blocks, amsgrad ? maxima.data() : nullptr, grad.data(), n,
                                   cursor(first_block), scalars, 12345);
    sum = sums.averaged;
    grad_sum = sums.grad;
  }
};

template <typename T>
int64_t differing(const std::vector<T>& a, const std::vector<T>& b, double tolerance) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += !(std::abs(double(a[i]) - double(b[i])) <= tolerance);
  return count;
}

void compare(const char* name, UpdateBlocks& update, bool amsgrad, Decay decay, bool from_grad, int64_t columns) {
  Run plain(columns), own(columns);
  for (int t = 0; t < 4; ++t) {
    plain.step(update_blocks_in_plain_loops, amsgrad, decay, from_grad, (int64_t{1} << 33) + t);
    own.step(update, amsgrad, decay, from_grad, (int64_t{1} << 33) + t);
  }
  std::printf("%s codes %lld far %lld params %lld sums %d\n", name,
              static_cast<long long>(differing(plain.exp_avg, own.exp_avg, 0) + differing(plain.root, own.root, 0)),
              static_cast<long long>(differing(plain.exp_avg, own.exp_avg, 1) + differing(plain.root, own.root, 1)),
              static_cast<long long>(differing(plain.param, own.param, 1e-4)),
              own.sum == sum_coded(own.root.data(), own.root_scales.data(), own.n, own.cursor(0)) &&
                  std::abs(own.grad_sum / plain.grad_sum - 1) < 1e-5 && own.is_untouched_behind());
}

void compare(const char* name, UpdateBlocks& update) {
  for (const bool amsgrad : {false, true}) {
    for (const Decay decay : {Decay::Plain, Decay::L2, Decay::Cautious}) {
      for (const bool from_grad : {false, true}) {
        for (const int64_t columns : {1, 16, 27, 33, 72, 256, 264, 576, 1023}) {
          compare(name, update, amsgrad, decay, from_grad, columns);
        }
      }
    }
  }
}

}  // namespace

int main() {
  compare("plain", update_blocks_in_plain_loops);
  if (has_avx2()) compare("avx2", update_blocks_by_avx2);
  if (has_avx512()) compare("avx512", update_blocks_by_avx512);
}
