// One tensor as the passes see it: elements in the order of the walk, whatever its strides and dtype are.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "../random_bits.h"
#include "blocks.h"

namespace swd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
constexpr ScalarType scalar_type_of = std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Double;

// A tensor's properties, read once: each is a call across the ABI, which adds up for a thousand tensors.
struct View {
  explicit View(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        dtype(tensor.scalar_type()),
        sizes(tensor.sizes()),
        strides(tensor.strides().data()) {}

  // The same elements with other strides.
  View(const View& like, const int64_t* strides)
      : data(like.data), dtype(like.dtype), sizes(like.sizes), strides(strides) {}

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t numel() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t d = dim() - 1; d >= 0; --d) {
      if (sizes[d] != 1 && strides[d] != expected) return false;
      expected *= sizes[d];
    }
    return true;
  }

  char* data;
  ScalarType dtype;
  torch::headeronly::IntHeaderOnlyArrayRef sizes;
  const int64_t* strides;
};

// The order in which a tensor's dimensions are walked. That of exp_avg_sq in every pass that reads it, so
// that its sum comes out the same bit for bit, whether an update emits it or it is rebuilt from storage.
class WalkOrder {
 public:
  explicit WalkOrder(const View& view) : row_major_(view.is_contiguous()) {
    if (row_major_) return;
    dims_.resize(view.dim());
    std::iota(dims_.begin(), dims_.end(), 0);
    std::stable_sort(dims_.begin(), dims_.end(),
                     [&](int64_t a, int64_t b) { return view.strides[a] > view.strides[b]; });
  }
  static WalkOrder along_rows() { return WalkOrder(true); }
  bool row_major() const { return row_major_; }
  int64_t operator[](int64_t i) const { return row_major_ ? i : dims_[i]; }

 private:
  explicit WalkOrder(bool row_major) : row_major_(row_major) {}

  bool row_major_;
  std::vector<int64_t> dims_;
};

// Dimensions that are walked as one: `size` elements, `stride` apart.
struct Run {
  int64_t size, stride;
};

// Adds a run inside of the others, as one with its neighbour where memory allows.
inline void add_run(std::vector<Run>& runs, const Run& run) {
  if (run.size == 1) return;
  if (!runs.empty() && runs.back().stride == run.size * run.stride) {
    runs.back() = {runs.back().size * run.size, run.stride};
  } else {
    runs.push_back(run);
  }
}

// None if the elements lie one behind the other.
inline std::vector<Run> without_array(std::vector<Run> runs) {
  if (runs.size() == 1 && runs[0].stride == 1) runs.clear();
  return runs;
}

// Dimensions in the order of the walk, outermost first, neighbours merged where memory allows. None if the elements lie
// one behind the other.
inline std::vector<Run> runs_of(const View& view, const WalkOrder& order) {
  std::vector<Run> runs;
  if (order.row_major() && view.is_contiguous()) return runs;
  for (int64_t i = 0; i < view.dim(); ++i) add_run(runs, {view.sizes[order[i]], view.strides[order[i]]});
  return without_array(std::move(runs));
}

// The runs of one tensor, as a function from the walk to positions. They must outlive it.
class Positions {
 public:
  Positions() = default;
  Positions(const Run* runs, size_t run_count) : runs_(runs), run_count_(run_count) {}

  bool dense() const { return run_count_ == 0; }
  const Run* runs() const { return runs_; }
  size_t run_count() const { return run_count_; }

  // Calls f(position, stride, offset, count) for each run of equal stride among n elements from begin on.
  template <typename F>
  void visit(int64_t begin, int64_t n, const F& f) const {
    if (dense()) return f(begin, int64_t{1}, int64_t{0}, n);
    const Run inner = runs_[run_count_ - 1];
    for (int64_t done = 0; done < n;) {
      int64_t outer = (begin + done) / inner.size;
      const int64_t first = (begin + done) % inner.size;
      const int64_t count = std::min(n - done, inner.size - first);
      int64_t position = first * inner.stride;
      for (const Run* run = runs_ + run_count_ - 1; run-- != runs_;) {
        position += outer % run->size * run->stride;
        outer /= run->size;
      }
      f(position, inner.stride, done, count);
      done += count;
    }
  }

 private:
  const Run* runs_ = nullptr;
  size_t run_count_ = 0;  // 0: one array
};

// The same elements, in the order in which they lie in memory, and again where they are repeated.
inline std::vector<Run> in_memory_order(const Positions& positions) {
  std::vector<Run> runs(positions.runs(), positions.runs() + positions.run_count()), merged;
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return a.stride == 0 || b.stride == 0 ? a.stride == 0 && b.stride != 0 : a.stride > b.stride;
  });
  for (const Run& run : runs) add_run(merged, run);
  return without_array(std::move(merged));
}

class ElementNumbers;

// A tensor of any dtype and layout. Loops over elements want one array: Staged (staged.h) makes it one.
class Operand {
 public:
  Operand() = default;
  Operand(char* data, ScalarType dtype, Positions positions) : data_(data), dtype_(dtype), positions_(positions) {}

  bool is_array() const { return positions_.dense(); }
  const Positions& positions() const { return positions_; }
  ScalarType dtype() const { return dtype_; }
  int64_t item_size() const {
    if (is_code()) return 1;
    return is_double() ? 8 : is<float>() ? 4 : 2;
  }

  template <typename T>
  bool is() const {
    return dtype_ == scalar_type_of<T>;
  }
  char* data() const { return data_; }
  bool is_bfloat16() const { return dtype_ == ScalarType::BFloat16; }
  bool is_double() const { return dtype_ == ScalarType::Double; }
  bool is_code() const { return dtype_ == ScalarType::Byte || dtype_ == ScalarType::Char; }
  bool is_remainder() const { return dtype_ == ScalarType::Short; }

  // The address of an element, if it is a T.
  template <typename T>
  T* direct(int64_t begin) const {
    return is<T>() ? reinterpret_cast<T*>(data_) + begin : nullptr;
  }

  // `n` elements as an array of T: in place if they are one, else copied into `scratch`.
  template <typename T>
  T* read(T* scratch, int64_t begin, int64_t n) const {
    if (T* array = direct<T>(begin)) return array;
    as_stored(begin, [&](auto* src) { load(scratch, src, n); });
    return scratch;
  }

  // The counterpart of read: a no-op if `block` is the tensor's own memory.
  template <typename T>
  void write(const T* block, int64_t begin, int64_t n) const {
    if (direct<T>(begin)) return;
    as_stored(begin, [&](auto* dst) { store(dst, block, n); });
  }

  // For bfloat16 storage: the counterpart of read, rounding at random.
  void write_stochastically(const float* block, int64_t begin, int64_t n, uint32_t key,
                            const ElementNumbers& numbers) const;

  // Elements of 16 bits as they are stored.
  uint16_t* bits(int64_t begin) const { return reinterpret_cast<uint16_t*>(data_) + begin; }

 private:
  template <typename F>
  void as_stored(int64_t begin, const F& f) const {
    switch (dtype_) {
      case ScalarType::Float:
        return f(reinterpret_cast<float*>(data_) + begin);
      case ScalarType::Double:
        return f(reinterpret_cast<double*>(data_) + begin);
      case ScalarType::BFloat16:
        return f(reinterpret_cast<BFloat16Bits*>(data_) + begin);
      default:
        return f(reinterpret_cast<Float16Bits*>(data_) + begin);
    }
  }

  char* data_ = nullptr;
  ScalarType dtype_ = ScalarType::Float;
  Positions positions_;
};

// The numbers of a tensor's elements, for stochastic rounding: row-major in the whole tensor, of which this one may be
// a shard, whatever the strides in memory are. So layouts and shards do not change the random bits.
class ElementNumbers {
 public:
  ElementNumbers(int64_t first, Positions positions) : first_(first), positions_(positions) {}

  // Calls f(offset, count, key, number, stride) for each run among n elements from begin on, in which numbers have
  // the same upper 32 bits: they are in the key, and the lower ones run from `number` on, `stride` apart.
  template <typename F>
  void visit(int64_t begin, int64_t n, uint32_t key, const F& f) const {
    positions_.visit(begin, n, [&](int64_t position, int64_t stride, int64_t offset, int64_t count) {
      for (int64_t done = 0; done < count;) {
        const int64_t number = first_ + position + done * stride;
        const int64_t upper_end = ((number >> 32) + 1) << 32;
        const int64_t length = std::min(count - done, (upper_end - number + stride - 1) / stride);
        f(offset + done, length, run_key(key, number), static_cast<uint32_t>(number), static_cast<uint32_t>(stride));
        done += length;
      }
    });
  }

 private:
  int64_t first_;
  Positions positions_;
};

inline void Operand::write_stochastically(const float* block, int64_t begin, int64_t n, uint32_t key,
                                          const ElementNumbers& numbers) const {
  BFloat16Bits* dst = reinterpret_cast<BFloat16Bits*>(data_) + begin;
  numbers.visit(begin, n, key, [&](int64_t at, int64_t length, uint32_t own_key, uint32_t number, uint32_t stride) {
    store_stochastically(dst + at, block + at, length, own_key, number, stride);
  });
}

}  // namespace swd
