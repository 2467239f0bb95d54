// One tensor as the passes see it: elements in the order of the walk, whatever its strides and dtype are.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../random_bits.h"
#include "blocks.h"

namespace swd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
constexpr ScalarType scalar_type_of = std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Double;

// What is asked of a tensor, asked once: each question is a call across the ABI, which a thousand tensors feel.
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

// Dimensions in the order of the walk, outermost first, neighbours merged where memory allows. None if the elements lie
// one behind the other.
inline std::vector<Run> runs_of(const View& view, const WalkOrder& order) {
  std::vector<Run> runs;
  if (order.row_major() && view.is_contiguous()) return runs;
  for (int64_t i = 0; i < view.dim(); ++i) {
    const Run run{view.sizes[order[i]], view.strides[order[i]]};
    if (run.size == 1) continue;
    if (!runs.empty() && runs.back().stride == run.size * run.stride) {
      runs.back() = {runs.back().size * run.size, run.stride};
    } else {
      runs.push_back(run);
    }
  }
  if (runs.size() == 1 && runs[0].stride == 1) runs.clear();
  return runs;
}

// The runs of one tensor, as a function from the walk to positions. They must outlive it.
class Positions {
 public:
  Positions() = default;
  Positions(const Run* runs, size_t run_count) : runs_(runs), run_count_(run_count) {}

  bool dense() const { return run_count_ == 0; }

  // Calls f(position, stride, offset, count) for each stretch of equal stride among n elements from begin on.
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

class ElementNumbers;

class Operand {
 public:
  Operand() = default;
  Operand(char* data, ScalarType dtype, Positions positions) : data_(data), dtype_(dtype), positions_(positions) {}

  // The address of an element, if `n` elements from it on are a plain array of T.
  template <typename T>
  T* direct(int64_t begin) const {
    return positions_.dense() && is<T>() ? reinterpret_cast<T*>(data_) + begin : nullptr;
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

  // `n` elements as an array of T: in place if they are one, else copied into `scratch`.
  template <typename T>
  T* read(T* scratch, int64_t begin, int64_t n) const {
    if (T* array = direct<T>(begin)) return array;
    visit(begin, n, [&](auto* src, int64_t stride, int64_t offset, int64_t count) {
      load(scratch + offset, src, stride, count);
    });
    return scratch;
  }

  // The counterpart of read: a no-op if `block` is the tensor's own memory.
  template <typename T>
  void write(const T* block, int64_t begin, int64_t n) const {
    if (direct<T>(begin)) return;
    visit(begin, n,
          [&](auto* dst, int64_t stride, int64_t offset, int64_t count) { store(dst, stride, block + offset, count); });
  }

  // For bfloat16 storage: the counterpart of read, rounding at random.
  void write_stochastically(const float* block, int64_t begin, int64_t n, uint32_t key,
                            const ElementNumbers& numbers) const;

  // Elements of 16 bits as they are stored: where they are if they are one array, else null.
  uint16_t* direct_bits(int64_t begin) const {
    return positions_.dense() ? reinterpret_cast<uint16_t*>(data_) + begin : nullptr;
  }
  const uint16_t* read_bits(uint16_t* scratch, int64_t begin, int64_t n) const {
    if (const uint16_t* array = direct_bits(begin)) return array;
    visit_as<uint16_t>(begin, n, [&](const uint16_t* src, int64_t stride, int64_t offset, int64_t count) {
      for (int64_t i = 0; i < count; ++i) scratch[offset + i] = src[i * stride];
    });
    return scratch;
  }
  void write_bits(const uint16_t* bits, int64_t begin, int64_t n) const {
    if (direct_bits(begin)) return;
    visit_as<uint16_t>(begin, n, [&](uint16_t* dst, int64_t stride, int64_t offset, int64_t count) {
      for (int64_t i = 0; i < count; ++i) dst[i * stride] = bits[offset + i];
    });
  }

 private:
  // Calls f(pointer, stride, offset, count) for each stretch of equal stride among n elements from begin on.
  template <typename F>
  void visit(int64_t begin, int64_t n, const F& f) const {
    switch (dtype_) {
      case ScalarType::Float:
        return visit_as<float>(begin, n, f);
      case ScalarType::Double:
        return visit_as<double>(begin, n, f);
      case ScalarType::BFloat16:
        return visit_as<BFloat16Bits>(begin, n, f);
      default:
        return visit_as<Float16Bits>(begin, n, f);
    }
  }

  template <typename S, typename F>
  void visit_as(int64_t begin, int64_t n, const F& f) const {
    positions_.visit(begin, n, [&](int64_t position, int64_t stride, int64_t offset, int64_t count) {
      f(reinterpret_cast<S*>(data_) + position, stride, offset, count);
    });
  }

  char* data_ = nullptr;
  ScalarType dtype_ = ScalarType::Float;
  Positions positions_;
};

// The numbers that tell a tensor's elements apart where rounding is stochastic: row-major in the whole tensor, of which
// this one may be a shard, whatever the strides in memory are. So layouts and shards do not change the random bits.
class ElementNumbers {
 public:
  ElementNumbers(int64_t first, Positions positions) : first_(first), positions_(positions) {}

  // Calls f(offset, count, key, number, stride) for each stretch among n elements from begin on, in which numbers have
  // the same upper 32 bits: they are in the key, and the lower ones run from `number` on, `stride` apart.
  template <typename F>
  void visit(int64_t begin, int64_t n, uint32_t key, const F& f) const {
    positions_.visit(begin, n, [&](int64_t position, int64_t stride, int64_t offset, int64_t count) {
      for (int64_t done = 0; done < count;) {
        const int64_t number = first_ + position + done * stride;
        const int64_t upper_end = ((number >> 32) + 1) << 32;
        const int64_t length = std::min(count - done, (upper_end - number + stride - 1) / stride);
        f(offset + done, length, stretch_key(key, number), static_cast<uint32_t>(number),
          static_cast<uint32_t>(stride));
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
  visit_as<BFloat16Bits>(begin, n, [&](BFloat16Bits* dst, int64_t stride, int64_t offset, int64_t count) {
    numbers.visit(begin + offset, count, key,
                  [&](int64_t at, int64_t length, uint32_t own_key, uint32_t number, uint32_t number_stride) {
                    store_stochastically(dst + at * stride, stride, block + offset + at, length, own_key, number,
                                         number_stride);
                  });
  });
}

}  // namespace swd
