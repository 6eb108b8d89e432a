// total[m, n] += left[m, k] @ right[k, n]: float sums of bfloat16 products, in place.
//
// torch's CPU products of bfloat16 return bfloat16, which rounds every chunk's part of a sum. This
// is the same hardware product (oneDNN's brgemm as ATen wraps it) with its float sums added to
// `total` as they are.

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace {

using at::BFloat16;

// A tile of `left`, rows contiguous and padded with zeros, as brgemm reads it.
void copy_tile(BFloat16* tile, const BFloat16* left, int64_t rows, int64_t depth, int64_t padded,
               int64_t row_stride, int64_t depth_stride) {
  for (int64_t k = 0; k < padded; k += 2) {  // two at a time: `left` is mostly a transposed view
    const BFloat16* first = left + k * depth_stride;
    const BFloat16* second = first + depth_stride;
    for (int64_t row = 0; row < rows; ++row) {
      tile[row * padded + k] = k < depth ? first[row * row_stride] : BFloat16(0);
      tile[row * padded + k + 1] = k + 1 < depth ? second[row * row_stride] : BFloat16(0);
    }
  }
}

}  // namespace

extern "C" bool supported() { return at::native::cpublas::could_pack(at::kBFloat16); }

// right: [padded / 2, n, 2], pairs of rows interleaved ("VNNI"), zeros from row k on. `padded` is
// even. The strides are in elements.
// Returns null, or why the product failed, with a part of the sum done.
extern "C" const char* add_product(float* total, const BFloat16* left, const BFloat16* right,
                                   int64_t m, int64_t n, int64_t k, int64_t padded,
                                   int64_t total_stride, int64_t row_stride, int64_t depth_stride,
                                   int64_t rows, int64_t columns, int64_t threads) {
  static thread_local std::string failure;
  failure.clear();
  std::string* const reason = &failure;  // in the threads below, the name means their own
  const int64_t row_blocks = (m + rows - 1) / rows;
  const int64_t column_blocks = (n + columns - 1) / columns;
  // Not by at::parallel_for, which asks for a thread's number: where a compiler brings an OpenMP
  // runtime of its own, beside torch's, the answer may come from the wrong one.
#pragma omp parallel num_threads(threads)
  {
    std::vector<BFloat16> tile(rows * padded);
    int64_t held = -1;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < row_blocks * column_blocks; ++block) {
      const int64_t row = block / column_blocks * rows;
      const int64_t column = block % column_blocks * columns;
      const int64_t height = std::min(rows, m - row);
      if (row != held) {
        copy_tile(tile.data(), left + row * row_stride, height, k, padded, row_stride,
                  depth_stride);
        held = row;
      }
      try {
        at::native::cpublas::brgemm(height, std::min(columns, n - column), padded, padded, n,
                                    total_stride, /*add_C=*/true, tile.data(), right + column * 2,
                                    total + row * total_stride + column);
      } catch (const std::exception& error) {
#pragma omp critical
        *reason = error.what();
      }
    }
    at::native::cpublas::brgemm_release();
  }
  return failure.empty() ? nullptr : failure.c_str();
}
