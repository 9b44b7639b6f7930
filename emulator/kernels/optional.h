// Tensors that the caller, or a CPU kernel, may leave out.
#pragma once

#include "kernel.h"

namespace emulator {

inline std::optional<at::Tensor> if_defined(In tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

inline void copy_if_wanted(Out out, In result) {
  if (out.defined() && result.defined()) out.copy_(result);
}

}  // namespace emulator
