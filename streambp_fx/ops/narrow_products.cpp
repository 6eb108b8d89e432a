// total[m, n] += left[m, k] @ right[k, n]: float sums of bfloat16 products, in place.
//
// torch's CPU products of bfloat16 return bfloat16, which rounds every chunk's part of a sum. This
// is the same hardware product (oneDNN's brgemm as ATen wraps it) with its float sums added to
// `total` as they are.

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>

namespace {

using at::BFloat16;

// A tile of `left`, rows contiguous and padded to an even depth, as brgemm reads it.
void copy_tile(BFloat16* tile, const BFloat16* left, int64_t rows, int64_t depth, int64_t even,
               int64_t row_stride, int64_t depth_stride) {
  for (int64_t k = 0; k < even; k += 2) {  // two at a time: `left` is mostly a transposed view
    const BFloat16* first = left + k * depth_stride;
    const BFloat16* second = first + depth_stride;
    const bool padded = k + 1 == depth;
    for (int64_t row = 0; row < rows; ++row) {
      tile[row * even + k] = first[row * row_stride];
      tile[row * even + k + 1] = padded ? BFloat16(0) : second[row * row_stride];
    }
  }
}

}  // namespace

extern "C" bool supported() { return at::native::cpublas::could_pack(at::kBFloat16); }

// right: [even / 2, n, 2], pairs of rows interleaved ("VNNI"), an odd last row paired with zeros.
// tiles: [threads, rows, even], workspace. The strides are in elements.
// Returns null, or why the product failed, with a part of the sum done.
extern "C" const char* add_product(float* total, const BFloat16* left, const BFloat16* right,
                                   BFloat16* tiles, int64_t m, int64_t n, int64_t k,
                                   int64_t total_stride, int64_t row_stride, int64_t depth_stride,
                                   int64_t rows, int64_t columns) try {
  const int64_t even = k + k % 2;
  const int64_t row_blocks = (m + rows - 1) / rows;
  const int64_t column_blocks = (n + columns - 1) / columns;
  at::parallel_for(0, row_blocks * column_blocks, 1, [&](int64_t begin, int64_t end) {
    BFloat16* tile = tiles + at::get_thread_num() * rows * even;
    int64_t held = -1;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block / column_blocks * rows;
      const int64_t column = block % column_blocks * columns;
      const int64_t height = std::min(rows, m - row);
      if (row != held) {
        copy_tile(tile, left + row * row_stride, height, k, even, row_stride, depth_stride);
        held = row;
      }
      at::native::cpublas::brgemm(height, std::min(columns, n - column), even, even, n,
                                  total_stride, /*add_C=*/true, tile, right + column * 2,
                                  total + row * total_stride + column);
    }
    at::native::cpublas::brgemm_release();
  });
  return nullptr;
} catch (const std::exception& error) {
  static thread_local std::string failure;
  failure = error.what();
  return failure.c_str();
}
