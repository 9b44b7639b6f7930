#include "reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace emulator::hccl {
namespace {

template <class Number, class Combine>
void each(void* total, const void* other, uint64_t count, Combine combine) {
  auto* mine = static_cast<Number*>(total);
  const auto* theirs = static_cast<const Number*>(other);
  for (uint64_t i = 0; i < count; ++i) mine[i] = static_cast<Number>(combine(mine[i], theirs[i]));
}

template <class Number>
void reduce_as(void* total, const void* other, uint64_t count, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM: return each<Number>(total, other, count, [](Number a, Number b) { return a + b; });
    case HCCL_REDUCE_PROD: return each<Number>(total, other, count, [](Number a, Number b) { return a * b; });
    case HCCL_REDUCE_MAX: return each<Number>(total, other, count, [](Number a, Number b) { return a < b ? b : a; });
    default: return each<Number>(total, other, count, [](Number a, Number b) { return b < a ? b : a; });
  }
}

}  // namespace

bool can_reduce(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
    case HCCL_DATA_TYPE_FP32: return true;
    default: return false;
  }
}

void reduce(void* total, const void* other, uint64_t count, HcclDataType dtype, HcclReduceOp op) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t>(total, other, count, op);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t>(total, other, count, op);
    case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t>(total, other, count, op);
    case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t>(total, other, count, op);
    case HCCL_DATA_TYPE_FP16: return reduce_as<c10::Half>(total, other, count, op);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<c10::BFloat16>(total, other, count, op);
    default: return reduce_as<float>(total, other, count, op);
  }
}

}  // namespace emulator::hccl
