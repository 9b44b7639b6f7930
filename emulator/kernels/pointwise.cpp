// One output element from the input elements at the same place.
#include "optional.h"

#include <ATen/ScalarOps.h>

using namespace emulator;

#define UNARY(Name, function)                                          \
  ACLNN_AS(aclnn##Name, (In self, Out out), function##_out(out, self)) \
  ACLNN_AS(aclnnInplace##Name, (Update self), function##_out(self, self))

#define UNCHECKED_UNARY(Name, function)                                 \
  ACLNN(aclnn##Name, (In self, Out out), at::function##_out(out, self)) \
  ACLNN(aclnnInplace##Name, (Update self), at::function##_out(self, self))

UNCHECKED_UNARY(Abs, abs)
UNCHECKED_UNARY(LogicalNot, logical_not)
UNARY(Neg, neg)
UNARY(Sign, sgn)
UNARY(Sqrt, sqrt)
UNARY(Rsqrt, rsqrt)
UNARY(Reciprocal, reciprocal)
UNARY(Exp, exp)
UNARY(Exp2, exp2)
UNARY(Expm1, expm1)
UNARY(Log, log)
UNARY(Log2, log2)
UNARY(Log10, log10)
UNARY(Log1p, log1p)
UNARY(Sin, sin)
UNARY(Cos, cos)
UNARY(Tan, tan)
UNARY(Sinh, sinh)
UNARY(Cosh, cosh)
UNARY(Tanh, tanh)
UNARY(Erf, erf)
UNARY(Floor, floor)
UNARY(Ceil, ceil)
UNARY(Trunc, trunc)
UNARY(Round, round)
UNARY(Sigmoid, sigmoid)
UNARY(BitwiseNot, bitwise_not)

// A number as a tensor that promotes types as Python numbers do. Tensor::mul_(Scalar) would round the number
// to the tensor's dtype first, so scalar operands of products go this way too.
static at::Tensor wrap(Number value) { return at::native::wrapped_scalar_tensor(value); }

#define SUM(Name, function)                                                                                       \
  ACLNN_AS(aclnn##Name, (In self, In other, Number alpha, Out out), function##_out(out, self, other, alpha))      \
  ACLNN(aclnn##Name##s, (In self, Number other, Number alpha, Out out),                                           \
        out.copy_(at::function(self, other, alpha)))                                                              \
  ACLNN_IF(aclnnInplace##Name, (Update self, In other, Number alpha), at::meta::function##_(self, other, alpha),  \
           self.function##_(other, alpha))                                                                        \
  ACLNN_IF(aclnnInplace##Name##s, (Update self, Number other, Number alpha),                                      \
           at::meta::function##_(self, wrap(other), alpha), self.function##_(other, alpha))

SUM(Add, add)
SUM(Sub, sub)
ACLNN(aclnnAddV3, (Number self, In other, Number alpha, Out out),
      out.copy_(at::add(wrap(self), other, alpha)))
ACLNN(aclnnRsub, (In self, In other, Number alpha, Out out), out.copy_(at::rsub(self, other, alpha)))
ACLNN(aclnnRsubs, (In self, Number other, Number alpha, Out out), out.copy_(at::rsub(self, other, alpha)))

#define PRODUCT(Name, function)                                                                         \
  ACLNN_AS(aclnn##Name, (In self, In other, Out out), function##_out(out, self, other))                 \
  ACLNN(aclnn##Name##s, (In self, Number other, Out out), out.copy_(at::function(self, other)))         \
  ACLNN_IF(aclnnInplace##Name, (Update self, In other), at::meta::function##_(self, other),             \
           self.function##_(other))                                                                     \
  ACLNN_IF(aclnnInplace##Name##s, (Update self, Number other), at::meta::function##_(self, wrap(other)), \
           self.function##_(wrap(other)))

PRODUCT(Mul, mul)
PRODUCT(Div, div)
ACLNN_IF(aclnnFloorDivide, (In self, In other, Out out), at::meta::div_out(out, self, other, "floor"),
         at::floor_divide_out(out, self, other))
ACLNN(aclnnFloorDivides, (In self, Number other, Out out), out.copy_(at::floor_divide(self, other)))
ACLNN_IF(aclnnInplaceFloorDivide, (Update self, In other), at::meta::div_(self, other, "floor"),
         self.floor_divide_(other))
ACLNN_IF(aclnnInplaceFloorDivides, (Update self, Number other), at::meta::div_(self, wrap(other), "floor"),
         self.floor_divide_(wrap(other)))

static std::optional<c10::string_view> rounding(int mode) {
  if (mode == 1) return "trunc";
  if (mode == 2) return "floor";
  return std::nullopt;
}

ACLNN(aclnnDivMod, (In self, In other, int mode, Out out), out.copy_(at::div(self, other, rounding(mode))))
ACLNN(aclnnDivMods, (In self, Number other, int mode, Out out),
      out.copy_(at::div(self, other, rounding(mode))))
ACLNN_IF(aclnnInplaceDivMod, (Update self, In other, int mode), at::meta::div_(self, other, rounding(mode)),
         self.div_(other, rounding(mode)))
ACLNN_IF(aclnnInplaceDivMods, (Update self, Number other, int mode),
         at::meta::div_(self, wrap(other), rounding(mode)), self.div_(other, rounding(mode)))

ACLNN_AS(aclnnPowTensorScalar, (In self, Number exponent, Out out), pow_out(out, self, exponent))
ACLNN_AS(aclnnPowTensorTensor, (In self, In exponent, Out out), pow_out(out, self, exponent))
ACLNN_AS(aclnnPowScalarTensor, (Number self, In exponent, Out out), pow_out(out, self, exponent))
ACLNN_IF(aclnnInplacePowTensorScalar, (Update self, Number exponent), at::meta::pow_(self, exponent),
         self.pow_(exponent))
ACLNN_IF(aclnnInplacePowTensorTensor, (Update self, In exponent), at::meta::pow_(self, exponent),
         self.pow_(exponent))

ACLNN_AS(aclnnMaximum, (In self, In other, Out out), maximum_out(out, self, other))
ACLNN_AS(aclnnMinimum, (In self, In other, Out out), minimum_out(out, self, other))

#define COMPARISON(Name, function)                                                                               \
  ACLNN_AS(aclnn##Name##Tensor, (In self, In other, Out out), function##_out(out, self, other))                  \
  ACLNN_AS(aclnn##Name##Scalar, (In self, Number other, Out out), function##_out(out, self, other))              \
  ACLNN_IF(aclnnInplace##Name##Tensor, (Update self, In other), at::meta::function##_(self, other),              \
           self.function##_(other))                                                                              \
  ACLNN(aclnnInplace##Name##Scalar, (Update self, Number other), self.function##_(other))

COMPARISON(Eq, eq)
COMPARISON(Ne, ne)
COMPARISON(Lt, lt)
COMPARISON(Le, le)
COMPARISON(Gt, gt)
COMPARISON(Ge, ge)

ACLNN_IF(aclnnLogicalAnd, (In self, In other, Out out), at::meta::ne_out(out, self, other),
         at::logical_and_out(out, self, other))
ACLNN_IF(aclnnLogicalOr, (In self, In other, Out out), at::meta::ne_out(out, self, other),
         at::logical_or_out(out, self, other))
ACLNN_IF(aclnnLogicalXor, (In self, In other, Out out), at::meta::ne_out(out, self, other),
         at::logical_xor_out(out, self, other))
ACLNN_IF(aclnnInplaceLogicalAnd, (Update self, In other), at::meta::ne_(self, other), self.logical_and_(other))
ACLNN_IF(aclnnInplaceLogicalOr, (Update self, In other), at::meta::ne_(self, other), self.logical_or_(other))
ACLNN_AS(aclnnBitwiseAndTensor, (In self, In other, Out out), bitwise_and_out(out, self, other))
ACLNN(aclnnBitwiseAndScalar, (In self, Number other, Out out), at::bitwise_and_out(out, self, other))
ACLNN_AS(aclnnBitwiseOrTensor, (In self, In other, Out out), bitwise_or_out(out, self, other))
ACLNN(aclnnBitwiseOrScalar, (In self, Number other, Out out), at::bitwise_or_out(out, self, other))
ACLNN_IF(aclnnInplaceBitwiseAndTensor, (Update self, In other), at::meta::bitwise_and_(self, other),
         self.bitwise_and_(other))
ACLNN(aclnnInplaceBitwiseAndScalar, (Update self, Number other), self.bitwise_and_(other))
ACLNN(aclnnIsFinite, (In self, Out out), out.copy_(at::isfinite(self)))
ACLNN(aclnnIsNegInf, (In self, Out out), at::isneginf_out(out, self))

ACLNN_AS(aclnnClamp, (In self, MaybeNumber low, MaybeNumber high, Out out), clamp_out(out, self, low, high))
ACLNN_AS(aclnnClampMin, (In self, Number low, Out out), clamp_min_out(out, self, low))
ACLNN_AS(aclnnClampMax, (In self, Number high, Out out), clamp_max_out(out, self, high))
ACLNN_AS(aclnnClampTensor, (In self, In low, In high, Out out),
         clamp_out(out, self, if_defined(low), if_defined(high)))
ACLNN_AS(aclnnClampMinTensor, (In self, In low, Out out), clamp_min_out(out, self, low))
ACLNN_AS(aclnnClampMaxTensor, (In self, In high, Out out), clamp_max_out(out, self, high))
ACLNN(aclnnInplaceClampMax, (Update self, Number high), self.clamp_max_(high))
ACLNN_IF(aclnnInplaceClampMinTensor, (Update self, In low), at::meta::clamp_min_(self, low), self.clamp_min_(low))
ACLNN_IF(aclnnInplaceClampMaxTensor, (Update self, In high), at::meta::clamp_max_(self, high),
         self.clamp_max_(high))

ACLNN_AS(aclnnLerp, (In self, In end, In weight, Out out), lerp_out(out, self, end, weight))
ACLNN_AS(aclnnLerps, (In self, In end, Number weight, Out out), lerp_out(out, self, end, weight))
ACLNN_IF(aclnnInplaceLerp, (Update self, In end, In weight), at::meta::lerp_(self, end, weight),
         self.lerp_(end, weight))
ACLNN_IF(aclnnInplaceLerps, (Update self, In end, Number weight), at::meta::lerp_(self, end, weight),
         self.lerp_(end, weight))

ACLNN_AS(aclnnAddcmul, (In self, In first, In second, Number value, Out out),
         addcmul_out(out, self, first, second, value))
ACLNN_AS(aclnnAddcdiv, (In self, In first, In second, Number value, Out out),
         addcdiv_out(out, self, first, second, value))
ACLNN_IF(aclnnInplaceAddcmul, (Update self, In first, In second, Number value),
         at::meta::addcmul_(self, first, second, value), self.addcmul_(first, second, value))
ACLNN_IF(aclnnInplaceAddcdiv, (Update self, In first, In second, Number value),
         at::meta::addcdiv_(self, first, second, value), self.addcdiv_(first, second, value))
