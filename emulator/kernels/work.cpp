#include "work.h"

#include <algorithm>

namespace emulator {
namespace {

aclDataType dtype_of(const at::Tensor& factor) {
  switch (factor.scalar_type()) {
    case at::kBFloat16: return ACL_BF16;
    case at::kHalf: return ACL_FLOAT16;
    default: return ACL_FLOAT;
  }
}

double extent(const at::Tensor& tensor, int64_t dimension) { return static_cast<double>(tensor.size(dimension)); }

double elements(const at::Tensor& tensor) { return static_cast<double>(tensor.numel()); }

}  // namespace

double bytes_of(const at::Tensor& view) {
  if (!view.defined() || view.numel() == 0) return 0;
  double nbytes = view.element_size();
  for (int64_t i = 0; i < view.dim(); ++i) {
    if (view.stride(i) != 0) nbytes *= extent(view, i);
  }
  return nbytes;
}

Work product(const at::Tensor& first, const at::Tensor& second) {
  if (first.dim() < 2 || second.dim() < 2 || first.numel() == 0 || second.numel() == 0) return {};
  const double rows = extent(first, -2), inner = extent(first, -1), columns = extent(second, -1);
  const double products = std::max(elements(first) / (rows * inner), elements(second) / (inner * columns));
  // Of a batch that meets one matrix, all rows are rows of one product.
  const double rows_of_one = second.dim() == 2 ? rows * products : rows;
  return {.unit = Unit::matmul,
          .flops = 2 * products * rows * inner * columns,
          .dtype = dtype_of(first),
          .least = std::min({rows_of_one, inner, columns})};
}

Work grouped_product(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& second) {
  if (first.empty() || second.empty()) return {};
  double flops = 0, rows = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    flops += 2 * elements(first[i]) * extent(second[std::min(i, second.size() - 1)], -1);
    rows += extent(first[i], 0);
  }
  const at::Tensor& matrix = second[0];
  const double of_one = matrix.dim() == 3 ? extent(matrix, 0) : 1;
  const double groups = std::max({static_cast<double>(first.size()), static_cast<double>(second.size()), of_one});
  return {.unit = Unit::matmul,
          .flops = flops,
          .dtype = dtype_of(first[0]),
          .least = std::min({rows / groups, extent(matrix, -2), extent(matrix, -1)})};
}

Work convolution(const at::Tensor& positions, const at::Tensor& weight, int passes) {
  return {.unit = Unit::convolution,
          .flops = 2 * passes * elements(positions) * elements(weight) / std::max(1.0, extent(weight, 0)),
          .dtype = dtype_of(weight)};
}

Work attention(const at::Tensor& queries, double pairs, double depths, bool causal, bool backward,
               double nbytes) {
  return {.unit = Unit::attention,
          .flops = 2 * pairs * depths * (causal ? 0.5 : 1) * (backward ? 2.5 : 1),
          .dtype = dtype_of(queries),
          .least = depths / 2,
          .nbytes = nbytes};
}

}  // namespace emulator
