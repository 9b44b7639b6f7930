// One operation over lists of tensors, as optimizers use it.
#include "kernel.h"

#include <ATen/ScalarOps.h>

using namespace emulator;

// Runs work(i) for each output.
template <class Work>
static void for_each(Outs outs, Work work) {
  for (size_t i = 0; i < outs.size(); ++i) work(i);
}

#define FOREACH_UNARY(Name, function)              \
  ACLNN(aclnnForeach##Name, (Ins self, Outs outs), \
        for_each(outs, [&](size_t i) { at::function##_out(outs[i], self[i]); }))

FOREACH_UNARY(Abs, abs)
FOREACH_UNARY(Neg, neg)
FOREACH_UNARY(Sqrt, sqrt)
FOREACH_UNARY(Reciprocal, reciprocal)
FOREACH_UNARY(Exp, exp)
FOREACH_UNARY(Log, log)
FOREACH_UNARY(Sigmoid, sigmoid)
FOREACH_UNARY(Tanh, tanh)
FOREACH_UNARY(Sign, sign)

ACLNN(aclnnForeachCopy, (Ins source, Outs outs), for_each(outs, [&](size_t i) { outs[i].copy_(source[i]); }))
ACLNN(aclnnForeachZeroInplace, (Outs self), for_each(self, [&](size_t i) { self[i].zero_(); }))
ACLNN(aclnnForeachNorm, (Ins self, Number order, Outs outs), for_each(outs, [&](size_t i) {
        at::linalg_vector_norm_out(outs[i], self[i], order, std::nullopt, false, outs[i].scalar_type());
      }))

#define FOREACH_BY_SCALAR(Name, function, operand)                                                         \
  ACLNN(aclnnForeach##Name##ScalarV2, (Ins self, Number other, Outs outs),                                 \
        for_each(outs, [&](size_t i) { at::function##_out(outs[i], self[i], operand(other)); }))           \
  ACLNN(aclnnForeach##Name##ScalarList, (Ins self, Numbers others, Outs outs),                             \
        for_each(outs, [&](size_t i) { at::function##_out(outs[i], self[i], operand(others[i])); }))

FOREACH_BY_SCALAR(Add, add, at::native::wrapped_scalar_tensor)
FOREACH_BY_SCALAR(Sub, sub, at::native::wrapped_scalar_tensor)
FOREACH_BY_SCALAR(Mul, mul, at::native::wrapped_scalar_tensor)
FOREACH_BY_SCALAR(Div, div, at::native::wrapped_scalar_tensor)
FOREACH_BY_SCALAR(Pow, pow, at::Scalar)
FOREACH_BY_SCALAR(Maximum, clamp_min, at::Scalar)
FOREACH_BY_SCALAR(Minimum, clamp_max, at::Scalar)

#define FOREACH_BY_LIST(Name, function)                             \
  ACLNN(aclnnForeach##Name##List, (Ins self, Ins other, Outs outs), \
        for_each(outs, [&](size_t i) { at::function##_out(outs[i], self[i], other[i]); }))

FOREACH_BY_LIST(Mul, mul)
FOREACH_BY_LIST(Div, div)
FOREACH_BY_LIST(Pow, pow)
FOREACH_BY_LIST(Maximum, maximum)
FOREACH_BY_LIST(Minimum, minimum)

ACLNN(aclnnForeachAddListV2, (Ins self, Ins other, Number alpha, Outs outs),
      for_each(outs, [&](size_t i) { at::add_out(outs[i], self[i], other[i], alpha); }))
ACLNN(aclnnForeachSubListV2, (Ins self, Ins other, Number alpha, Outs outs),
      for_each(outs, [&](size_t i) { at::sub_out(outs[i], self[i], other[i], alpha); }))

ACLNN(aclnnForeachLerpScalar, (Ins self, Ins end, Number weight, Outs outs),
      for_each(outs, [&](size_t i) { at::lerp_out(outs[i], self[i], end[i], weight); }))
ACLNN(aclnnForeachLerpList, (Ins self, Ins end, Ins weight, Outs outs),
      for_each(outs, [&](size_t i) { at::lerp_out(outs[i], self[i], end[i], weight[i]); }))

// The factors of a ScalarList come as the elements of one tensor here, unlike above.
#define FOREACH_TERNARY(Name, function)                                                                      \
  ACLNN(aclnnForeach##Name##ScalarV2, (Ins self, Ins first, Ins second, Number value, Outs outs),            \
        for_each(outs, [&](size_t i) { at::function##_out(outs[i], self[i], first[i], second[i], value); })) \
  ACLNN(aclnnForeach##Name##ScalarList, (Ins self, Ins first, Ins second, In values, Outs outs),             \
        for_each(outs, [&](size_t i) {                                                                       \
          at::function##_out(outs[i], self[i], first[i], second[i], values[i].item());                       \
        }))

FOREACH_TERNARY(Addcmul, addcmul)
FOREACH_TERNARY(Addcdiv, addcdiv)
