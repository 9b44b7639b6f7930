// CANN's argument types as op-plugin makes them, and the ATen values that kernels work on.
#pragma once

#include "../runtime/operation.h"
#include "ranges.h"

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

// A dtype is kept as CANN's number: op-plugin cannot take an error from a Create call, so an unknown one
// is refused by the first operator that meets it.
struct aclTensor {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t storage_offset;
  aclDataType dtype;
  void* storage;
};

struct aclScalar {
  aclDataType dtype;
  alignas(16) unsigned char bytes[16];
};

struct aclIntArray {
  std::vector<int64_t> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclBoolArray {
  std::vector<bool> values;
};

struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};

struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};

namespace emulator {

// These throw std::invalid_argument for a dtype that the emulator does not know.
at::ScalarType scalar_type(aclDataType dtype);
at::Scalar scalar(const aclScalar& source);

// A view of the device memory; nullptr, an absent optional argument, gives an undefined tensor.
at::Tensor tensor(const aclTensor* source);
at::Tensor index(const aclTensor* source);  // throws std::invalid_argument unless it is of int32 or int64
std::vector<at::Tensor> tensors(const aclTensorList* source);

// Floats of less than 32 bits as floats of 32, in which CANN's fused operators compute them.
inline at::Tensor wide(const at::Tensor& narrow) {
  return narrow.element_size() < 4 ? narrow.to(at::kFloat) : narrow;
}

}  // namespace emulator
