#include "layout_copy.h"

#include <algorithm>
#include <type_traits>

#include "clones.h"

namespace swd {
namespace {

constexpr int64_t CACHE_LINE = 64;

// Rows of a plane are mostly in pages of their own, and no machine prefetches the next page by itself.
constexpr int64_t AHEAD = 16;

template <bool FOR_WRITING = false, typename Word>
SWD_INLINE void prefetch(const Word* plane, int64_t row, int64_t end, int64_t pitch, int64_t columns) {
  for (; row < end; ++row) {
    for (int64_t k = 0; k < columns; k += CACHE_LINE / sizeof(Word)) {
      __builtin_prefetch(plane + row * pitch + k, FOR_WRITING);
    }
  }
}

// Transposes N rows of N words in registers: in each round rows i and i + N / 2 are woven into rows 2 i and 2 i + 1.
template <typename Word, int N>
struct Tile {
  typedef Word Row __attribute__((vector_size(N * sizeof(Word))));
  Row rows[N];

  SWD_INLINE void transpose() {
    typedef std::make_signed_t<Word> Index __attribute__((vector_size(N * sizeof(Word))));
    Index low{}, high{};
    for (int i = 0; i < N; ++i) {
      low[i] = i / 2 + i % 2 * N;
      high[i] = low[i] + N / 2;
    }
#pragma GCC unroll 3
    for (int round = 1; round < N; round *= 2) {
      Row woven[N];
#pragma GCC unroll 8
      for (int i = 0; i < N / 2; ++i) {
        woven[2 * i] = __builtin_shuffle(rows[i], rows[i + N / 2], low);
        woven[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + N / 2], high);
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) rows[i] = woven[i];
    }
  }
};

// from[i * from_pitch + k] to to[k * to_pitch + i], for i < rows and k < columns. It waits for memory, not for
// shuffles: tiles of 8 or 16, prefetches 16, 32 or 64 rows ahead, 1 to 8 lines of a row at once take the same time.
template <int N, typename Word>
SWD_INLINE void transpose_tiles(Word* to, int64_t to_pitch, const Word* from, int64_t from_pitch, int64_t rows,
                                int64_t columns) {
  if constexpr (N == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < columns; ++k) to[k * to_pitch + i] = from[i * from_pitch + k];
    }
  } else {
    const int64_t whole_rows = rows / N * N, whole_columns = columns / N * N;
    for (int64_t i = 0; i < whole_rows; i += N) {
      prefetch(from, i + AHEAD, std::min(i + AHEAD + N, rows), from_pitch, columns);
      for (int64_t k = 0; k < whole_columns; k += N) {
        Tile<Word, N> tile;
#pragma GCC unroll 8
        for (int64_t r = 0; r < N; ++r) {
          tile.rows[r] = get<typename Tile<Word, N>::Row>(from + (i + r) * from_pitch + k);
        }
        tile.transpose();
#pragma GCC unroll 8
        for (int64_t r = 0; r < N; ++r) put(to + (k + r) * to_pitch + i, tile.rows[r]);
      }
    }
    transpose_tiles<1>(to + whole_columns * to_pitch, to_pitch, from + whole_columns, from_pitch, whole_rows,
                       columns - whole_columns);
    transpose_tiles<1>(to + whole_rows, to_pitch, from + whole_rows * from_pitch, from_pitch, rows - whole_rows,
                       columns);
  }
}

#define SWD_TRANSPOSE(Word)                                                                                     \
  SWD_CLONES void transpose(Word* to, int64_t to_pitch, const Word* from, int64_t from_pitch, int64_t rows,     \
                            int64_t columns) {                                                                  \
    transpose_tiles<8>(to, to_pitch, from, from_pitch, rows, columns);                                          \
  }                                                                                                             \
  SWD_CLONES void copy_strided(Word* to, int64_t to_stride, const Word* from, int64_t from_stride, int64_t n) { \
    if (to_stride == 1 && from_stride == 1) {                                                                   \
      std::memcpy(to, from, n * sizeof(Word));                                                                  \
    } else if (to_stride == 1 && from_stride == 2) {                                                            \
      for (int64_t i = 0; i < n; ++i) to[i] = from[2 * i];                                                      \
    } else {                                                                                                    \
      for (int64_t i = 0; i < n; ++i) to[i * to_stride] = from[i * from_stride];                                \
    }                                                                                                           \
  }

SWD_TRANSPOSE(uint16_t)
SWD_TRANSPOSE(uint32_t)
SWD_TRANSPOSE(uint64_t)

// A box of elements: the dimensions from `first` on, of the first of them `count` indices.
template <typename Word, bool TO_ARRAY>
class LayoutCopy {
 public:
  explicit LayoutCopy(const Positions& positions) : runs_(positions.runs()), last_(positions.run_count() - 1) {
    volumes_.resize(last_ + 1, 1);
    for (int64_t d = last_; d-- > 0;) volumes_[d] = volumes_[d + 1] * runs_[d + 1].size;
  }

  // Elements of the walk from `begin` to `end`, of the dimensions from `dim` on.
  void copy(int64_t dim, int64_t begin, int64_t end, Word* tensor, Word* array) {
    const int64_t volume = volumes_[dim];
    int64_t index = begin / volume;
    if (begin % volume) {
      const int64_t stop = std::min(end, (index + 1) * volume);
      copy(dim + 1, begin % volume, stop - index * volume, tensor + index * runs_[dim].stride, array);
      array += stop - begin;
      begin = stop;
      ++index;
    }
    if (const int64_t whole = (end - begin) / volume; begin < end && whole) {
      copy_box(dim, whole, tensor + index * runs_[dim].stride, array);
      array += whole * volume;
      begin += whole * volume;
      index += whole;
    }
    if (begin < end) copy(dim + 1, 0, end - begin, tensor + index * runs_[dim].stride, array);
  }

 private:
  void copy_box(int64_t first, int64_t count, Word* tensor, Word* array) {
    // The dimension whose elements lie nearest in memory, if it is not the walk's.
    int64_t nearest = last_;
    for (int64_t d = first; d < last_; ++d) {
      if (runs_[d].stride != 0 && runs_[d].stride < runs_[nearest].stride) nearest = d;
    }
    copy_dims(first, first, count, nearest, tensor, array);
  }

  void copy_dims(int64_t dim, int64_t first, int64_t count, int64_t nearest, Word* tensor, Word* array) {
    const auto size = [&](int64_t d) { return d == first ? count : runs_[d].size; };
    if (dim == nearest && dim < last_) ++dim;
    if (dim < last_) {
      for (int64_t i = 0; i < size(dim); ++i) {
        copy_dims(dim + 1, first, count, nearest, tensor + i * runs_[dim].stride, array + i * volumes_[dim]);
      }
    } else if (nearest != last_ && runs_[nearest].stride == 1) {
      copy_plane(tensor, runs_[last_].stride, array, volumes_[nearest], size(last_), size(nearest));
    } else {
      const int64_t planes = nearest == last_ ? 1 : size(nearest);
      for (int64_t i = 0; i < planes; ++i) {
        copy_row(tensor + i * runs_[nearest].stride, array + i * volumes_[nearest], size(last_));
      }
    }
  }

  void copy_plane(Word* tensor, int64_t tensor_pitch, Word* array, int64_t array_pitch, int64_t along_walk,
                  int64_t along_memory) {
    if constexpr (TO_ARRAY) {
      transpose(array, array_pitch, tensor, tensor_pitch, along_walk, along_memory);
    } else {
      // Whole lines of the tensor, one after another.
      constexpr int64_t WORDS = CACHE_LINE / sizeof(Word);
      for (int64_t i = 0; i < along_walk; i += WORDS) {
        prefetch<true>(tensor, i + AHEAD, std::min(i + AHEAD + WORDS, along_walk), tensor_pitch, along_memory);
        transpose(tensor + i * tensor_pitch, tensor_pitch, array + i, array_pitch, along_memory,
                  std::min(WORDS, along_walk - i));
      }
    }
  }

  void copy_row(Word* tensor, Word* array, int64_t n) {
    const int64_t stride = runs_[last_].stride;
    if constexpr (TO_ARRAY) {
      copy_strided(array, 1, tensor, stride, n);
    } else {
      copy_strided(tensor, stride, array, 1, n);
    }
  }

  const Run* runs_;
  int64_t last_;
  std::vector<int64_t> volumes_;
};

template <bool TO_ARRAY>
void copy(void* tensor, void* array, int64_t item_size, const Positions& positions, int64_t begin, int64_t n) {
  const auto by_words = [&](auto word) {
    using Word = decltype(word);
    LayoutCopy<Word, TO_ARRAY>(positions).copy(0, begin, begin + n, static_cast<Word*>(tensor),
                                               static_cast<Word*>(array));
  };
  if (n == 0) return;
  if (item_size == 2) return by_words(uint16_t{});
  if (item_size == 4) return by_words(uint32_t{});
  by_words(uint64_t{});
}

}  // namespace

void copy_to_array(void* array, const void* tensor, int64_t item_size, const Positions& positions, int64_t begin,
                   int64_t n) {
  copy<true>(const_cast<void*>(tensor), array, item_size, positions, begin, n);
}

void copy_to_tensor(void* tensor, const void* array, int64_t item_size, const Positions& positions, int64_t begin,
                    int64_t n) {
  copy<false>(tensor, const_cast<void*>(array), item_size, positions, begin, n);
}

int64_t elements_at_once(const Positions& positions, int64_t item_size) {
  int64_t volume = 1, at_once = 1, least = positions.runs()[positions.run_count() - 1].stride;
  for (size_t d = positions.run_count() - 1; d-- > 0;) {
    volume *= positions.runs()[d + 1].size;
    if (positions.runs()[d].stride == 0 || positions.runs()[d].stride >= least) continue;
    least = positions.runs()[d].stride;
    at_once = volume * std::min(positions.runs()[d].size, 2 * CACHE_LINE / item_size);
  }
  return at_once;
}

}  // namespace swd
