// Sums, products, maxima and minima of the types that HCCL reduces.
#pragma once

#include <hccl/hccl_types.h>

#include <cstdint>

namespace emulator::hccl {

bool can_reduce(HcclDataType dtype);

// total[i] = total[i] op other[i], rounded to the type each time.
void reduce(void* total, const void* other, uint64_t count, HcclDataType dtype, HcclReduceOp op);

}  // namespace emulator::hccl
