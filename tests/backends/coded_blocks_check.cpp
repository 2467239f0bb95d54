// Compares the updates of moments in 8 bits by each instruction set that this machine has. Prints one line for each.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../csrc/cpu/coded_blocks.h"

using namespace swd;

namespace {

constexpr int64_t BLOCKS = 5, N = BLOCKS * CODE_BLOCK;

struct Run {
  std::vector<float> param, grad, maxima, scales, root_scales;
  std::vector<int8_t> exp_avg;
  std::vector<uint8_t> root;
  double sum = 0, grad_sum = 0;

  Run() : scales(BLOCKS), root_scales(BLOCKS), exp_avg(N), root(N) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* values : {&param, &grad, &maxima}) {
      for (int64_t i = 0; i < N; ++i) values->push_back(normal(random) * (values == &param ? 1 : 0.01f));
    }
    for (float& x : maxima) x *= x;
  }

  void step(UpdateBlocks& update, bool amsgrad, Decay decay, bool from_grad, int64_t first_block) {
    const float l2 = decay == Decay::L2 ? 0.1f : 0, slope = from_grad ? -0.1f : 0.1f;
    const bool cautious = decay == Decay::Cautious;
    const Scalars<float> scalars{1, l2, slope, 0.99f, 0.01f, 1.5f, 1e-8f, 0.999f, 1e-3f, from_grad, cautious};
    const CodedBlocks blocks{exp_avg.data(), root.data(), scales.data(), root_scales.data()};
    const UpdateSums sums = update(param.data(), blocks, amsgrad ? maxima.data() : nullptr, grad.data(), BLOCKS,
                                   scalars, 12345, first_block);
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

void compare(const char* name, UpdateBlocks& update, bool amsgrad, Decay decay, bool from_grad) {
  Run plain, own;
  for (int t = 0; t < 4; ++t) {
    plain.step(update_blocks_in_plain_loops, amsgrad, decay, from_grad, (int64_t{1} << 33) + t);
    own.step(update, amsgrad, decay, from_grad, (int64_t{1} << 33) + t);
  }
  std::printf("%s codes %lld far %lld params %lld sums %d\n", name,
              static_cast<long long>(differing(plain.exp_avg, own.exp_avg, 0) + differing(plain.root, own.root, 0)),
              static_cast<long long>(differing(plain.exp_avg, own.exp_avg, 1) + differing(plain.root, own.root, 1)),
              static_cast<long long>(differing(plain.param, own.param, 1e-4)),
              own.sum == sum_coded(own.root.data(), own.root_scales.data(), N) &&
                  std::abs(own.grad_sum / plain.grad_sum - 1) < 1e-5);
}

void compare(const char* name, UpdateBlocks& update) {
  for (const bool amsgrad : {false, true}) {
    for (const Decay decay : {Decay::Plain, Decay::L2, Decay::Cautious}) {
      for (const bool from_grad : {false, true}) compare(name, update, amsgrad, decay, from_grad);
    }
  }
}

}  // namespace

int main() {
  compare("plain", update_blocks_in_plain_loops);
  if (has_avx2()) compare("avx2", update_blocks_by_avx2);
  if (has_avx512()) compare("avx512", update_blocks_by_avx512);
}
