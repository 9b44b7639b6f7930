// Dropout masks as CANN packs them: bit i of the bytes tells whether element i is kept.
#pragma once

#include "kernel.h"

namespace emulator {

at::Tensor unpack_dropout_mask(In mask, at::IntArrayRef shape);

}  // namespace emulator
