// The bytes that a tensor covers.
#pragma once

#include "../runtime/operation.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace emulator {

// The stretches of memory between which a strided view leaves gaps. One of more than 64 stretches counts as touched
// from its first byte to its last, gaps and all: exactness there would cost more than it finds.
inline std::vector<Range> ranges(const at::Tensor& view) {
  if (!view.defined() || view.numel() == 0) return {};
  std::vector<std::pair<int64_t, int64_t>> outer;  // stride in bytes, size
  for (int64_t i = 0; i < view.dim(); ++i) {
    if (view.size(i) > 1 && view.stride(i) != 0) outer.emplace_back(view.stride(i) * view.element_size(), view.size(i));
  }
  std::sort(outer.begin(), outer.end());
  int64_t hull = view.element_size();
  for (const auto& [stride, size] : outer) hull += stride * (size - 1);

  int64_t stretch = view.element_size();
  auto dimension = outer.begin();
  while (dimension != outer.end() && dimension->first <= stretch) {
    stretch += dimension->first * (dimension->second - 1);
    ++dimension;
  }
  outer.erase(outer.begin(), dimension);
  int64_t count = 1;
  for (const auto& [stride, size] : outer) count *= size;

  const auto* begin = static_cast<const char*>(view.const_data_ptr());
  constexpr int64_t most = 64;
  if (count > most) return {{begin, static_cast<size_t>(hull)}};
  std::vector<Range> stretches{{begin, static_cast<size_t>(stretch)}};
  for (const auto& [stride, size] : outer) {
    const size_t so_far = stretches.size();
    for (int64_t i = 1; i < size; ++i) {
      for (size_t j = 0; j < so_far; ++j) {
        stretches.push_back({static_cast<const char*>(stretches[j].begin) + i * stride, stretches[j].nbytes});
      }
    }
  }
  return stretches;
}

}  // namespace emulator
