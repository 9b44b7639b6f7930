// What kernels do beside moving their tensors' bytes, for modelled time.
#pragma once

#include "../runtime/work.h"

#include <ATen/ATen.h>

#include <vector>

namespace emulator {

// Of what lies in memory once, an expanded view's elements for example, the bytes count once.
double bytes_of(const at::Tensor& view);

inline Work softmax() { return {.unit = Unit::softmax}; }

// A matrix product, or a batch of them; [.., rows, inner] times [.., inner, columns]. Vectors are no matrices.
Work product(const at::Tensor& first, const at::Tensor& second);

// Each row of the first meets one matrix of the others.
Work grouped_product(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& second);

// Of so many pairs of a query and a key; depths: that of a key and that of a value, added up. Causal: half of the
// pairs count. The backward pass counts as two and a half forward ones. nbytes: what it moves, where that is known
// better than by its tensors; else 0.
Work attention(const at::Tensor& queries, double pairs, double depths, bool causal, bool backward, double nbytes);

// positions: a convolution's output, or a transposed one's input. passes: 1 forward, 1 for each gradient.
Work convolution(const at::Tensor& positions, const at::Tensor& weight, int passes);

}  // namespace emulator
