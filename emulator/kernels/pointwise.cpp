// One output element from the input elements at the same place.
#include "optional.h"

#include <ATen/ScalarOps.h>

using namespace emulator;

#define UNARY(Name, function)                                           \
  ACLNN(aclnn##Name, (In self, Out out), at::function##_out(out, self)) \
  ACLNN(aclnnInplace##Name, (Update self), at::function##_out(self, self))

UNARY(Abs, abs)
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
UNARY(LogicalNot, logical_not)
UNARY(BitwiseNot, bitwise_not)

// A number as a tensor that promotes types as Python numbers do. Tensor::mul_(Scalar) would round the number
// to the tensor's dtype first, so scalar operands of products go this way too.
static at::Tensor wrap(Number value) { return at::native::wrapped_scalar_tensor(value); }

#define SUM(Name, function)                                                                        \
  ACLNN(aclnn##Name, (In self, In other, Number alpha, Out out),                                   \
        at::function##_out(out, self, other, alpha))                                               \
  ACLNN(aclnn##Name##s, (In self, Number other, Number alpha, Out out),                            \
        out.copy_(at::function(self, other, alpha)))                                               \
  ACLNN(aclnnInplace##Name, (Update self, In other, Number alpha), self.function##_(other, alpha)) \
  ACLNN(aclnnInplace##Name##s, (Update self, Number other, Number alpha), self.function##_(other, alpha))

SUM(Add, add)
SUM(Sub, sub)
ACLNN(aclnnAddV3, (Number self, In other, Number alpha, Out out),
      out.copy_(at::add(wrap(self), other, alpha)))
ACLNN(aclnnRsub, (In self, In other, Number alpha, Out out), out.copy_(at::rsub(self, other, alpha)))
ACLNN(aclnnRsubs, (In self, Number other, Number alpha, Out out), out.copy_(at::rsub(self, other, alpha)))

#define PRODUCT(Name, function)                                                                 \
  ACLNN(aclnn##Name, (In self, In other, Out out), at::function##_out(out, self, other))        \
  ACLNN(aclnn##Name##s, (In self, Number other, Out out), out.copy_(at::function(self, other))) \
  ACLNN(aclnnInplace##Name, (Update self, In other), self.function##_(other))                   \
  ACLNN(aclnnInplace##Name##s, (Update self, Number other), self.function##_(wrap(other)))

PRODUCT(Mul, mul)
PRODUCT(Div, div)
PRODUCT(FloorDivide, floor_divide)

static std::optional<c10::string_view> rounding(int mode) {
  if (mode == 1) return "trunc";
  if (mode == 2) return "floor";
  return std::nullopt;
}

ACLNN(aclnnDivMod, (In self, In other, int mode, Out out), out.copy_(at::div(self, other, rounding(mode))))
ACLNN(aclnnDivMods, (In self, Number other, int mode, Out out),
      out.copy_(at::div(self, other, rounding(mode))))
ACLNN(aclnnInplaceDivMod, (Update self, In other, int mode), self.div_(other, rounding(mode)))
ACLNN(aclnnInplaceDivMods, (Update self, Number other, int mode), self.div_(other, rounding(mode)))

ACLNN(aclnnPowTensorScalar, (In self, Number exponent, Out out), at::pow_out(out, self, exponent))
ACLNN(aclnnPowTensorTensor, (In self, In exponent, Out out), at::pow_out(out, self, exponent))
ACLNN(aclnnPowScalarTensor, (Number self, In exponent, Out out), at::pow_out(out, self, exponent))
ACLNN(aclnnInplacePowTensorScalar, (Update self, Number exponent), self.pow_(exponent))
ACLNN(aclnnInplacePowTensorTensor, (Update self, In exponent), self.pow_(exponent))

ACLNN(aclnnMaximum, (In self, In other, Out out), at::maximum_out(out, self, other))
ACLNN(aclnnMinimum, (In self, In other, Out out), at::minimum_out(out, self, other))

#define COMPARISON(Name, function)                                                                   \
  ACLNN(aclnn##Name##Tensor, (In self, In other, Out out), at::function##_out(out, self, other))     \
  ACLNN(aclnn##Name##Scalar, (In self, Number other, Out out), at::function##_out(out, self, other)) \
  ACLNN(aclnnInplace##Name##Tensor, (Update self, In other), self.function##_(other))                \
  ACLNN(aclnnInplace##Name##Scalar, (Update self, Number other), self.function##_(other))

COMPARISON(Eq, eq)
COMPARISON(Ne, ne)
COMPARISON(Lt, lt)
COMPARISON(Le, le)
COMPARISON(Gt, gt)
COMPARISON(Ge, ge)

ACLNN(aclnnLogicalAnd, (In self, In other, Out out), at::logical_and_out(out, self, other))
ACLNN(aclnnLogicalOr, (In self, In other, Out out), at::logical_or_out(out, self, other))
ACLNN(aclnnLogicalXor, (In self, In other, Out out), at::logical_xor_out(out, self, other))
ACLNN(aclnnInplaceLogicalAnd, (Update self, In other), self.logical_and_(other))
ACLNN(aclnnInplaceLogicalOr, (Update self, In other), self.logical_or_(other))
ACLNN(aclnnBitwiseAndTensor, (In self, In other, Out out), at::bitwise_and_out(out, self, other))
ACLNN(aclnnBitwiseAndScalar, (In self, Number other, Out out), at::bitwise_and_out(out, self, other))
ACLNN(aclnnBitwiseOrTensor, (In self, In other, Out out), at::bitwise_or_out(out, self, other))
ACLNN(aclnnBitwiseOrScalar, (In self, Number other, Out out), at::bitwise_or_out(out, self, other))
ACLNN(aclnnInplaceBitwiseAndTensor, (Update self, In other), self.bitwise_and_(other))
ACLNN(aclnnInplaceBitwiseAndScalar, (Update self, Number other), self.bitwise_and_(other))
ACLNN(aclnnIsFinite, (In self, Out out), out.copy_(at::isfinite(self)))
ACLNN(aclnnIsNegInf, (In self, Out out), at::isneginf_out(out, self))

ACLNN(aclnnClamp, (In self, MaybeNumber low, MaybeNumber high, Out out), at::clamp_out(out, self, low, high))
ACLNN(aclnnClampMin, (In self, Number low, Out out), at::clamp_min_out(out, self, low))
ACLNN(aclnnClampMax, (In self, Number high, Out out), at::clamp_max_out(out, self, high))
ACLNN(aclnnClampTensor, (In self, In low, In high, Out out),
      at::clamp_out(out, self, if_defined(low), if_defined(high)))
ACLNN(aclnnClampMinTensor, (In self, In low, Out out), at::clamp_min_out(out, self, low))
ACLNN(aclnnClampMaxTensor, (In self, In high, Out out), at::clamp_max_out(out, self, high))
ACLNN(aclnnInplaceClampMax, (Update self, Number high), self.clamp_max_(high))
ACLNN(aclnnInplaceClampMinTensor, (Update self, In low), self.clamp_min_(low))
ACLNN(aclnnInplaceClampMaxTensor, (Update self, In high), self.clamp_max_(high))

ACLNN(aclnnLerp, (In self, In end, In weight, Out out), at::lerp_out(out, self, end, weight))
ACLNN(aclnnLerps, (In self, In end, Number weight, Out out), at::lerp_out(out, self, end, weight))
ACLNN(aclnnInplaceLerp, (Update self, In end, In weight), self.lerp_(end, weight))
ACLNN(aclnnInplaceLerps, (Update self, In end, Number weight), self.lerp_(end, weight))

ACLNN(aclnnAddcmul, (In self, In first, In second, Number value, Out out),
      at::addcmul_out(out, self, first, second, value))
ACLNN(aclnnAddcdiv, (In self, In first, In second, Number value, Out out),
      at::addcdiv_out(out, self, first, second, value))
ACLNN(aclnnInplaceAddcmul, (Update self, In first, In second, Number value), self.addcmul_(first, second, value))
ACLNN(aclnnInplaceAddcdiv, (Update self, In first, In second, Number value), self.addcdiv_(first, second, value))
