// Maximum and average over windows.
#include "kernel.h"

using namespace emulator;

// CANN marks each window's maximum in a mask of its own layout. It is left empty here, for its only reader, the
// backward pass, can find the maxima again.
static void max_pool(In self, Integers kernel, Integers stride, Integers padding, Integers dilation,
                     bool ceil_mode, Out out, Out mask) {
  out.copy_(at::max_pool2d(self, kernel, stride, padding, dilation, ceil_mode));
  mask.zero_();
}

static void max_pool_backward(In grad, In self, Integers kernel, Integers stride, Integers padding,
                              Integers dilation, bool ceil_mode, Out out) {
  auto [_, places] = at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil_mode);
  out.copy_(at::max_pool2d_with_indices_backward(grad, self, kernel, stride, padding, dilation, ceil_mode,
                                                 places));
}

ACLNN(aclnnMaxPool2dWithMask,
      (In self, Integers kernel, Integers stride, Integers padding, Integers dilation, bool ceil_mode,
       Out out, Out mask),
      max_pool(self, kernel, stride, padding, dilation, ceil_mode, out, mask))
ACLNN(aclnnMaxPool2dWithMaskBackward,
      (In grad, In self, In, Integers kernel, Integers stride, Integers padding, Integers dilation,
       bool ceil_mode, Out out),
      max_pool_backward(grad, self, kernel, stride, padding, dilation, ceil_mode, out))

static std::optional<int64_t> divisor_or_none(int64_t divisor) {
  return divisor == 0 ? std::nullopt : std::optional(divisor);
}

ACLNN(aclnnAvgPool2d,
      (In self, Integers kernel, Integers stride, Integers padding, bool ceil_mode, bool count_padding,
       int64_t divisor, int8_t, Out out),
      out.copy_(at::avg_pool2d(self, kernel, stride, padding, ceil_mode, count_padding,
                               divisor_or_none(divisor))))
ACLNN(aclnnAvgPool2dBackward,
      (In grad, In self, Integers kernel, Integers stride, Integers padding, bool ceil_mode,
       bool count_padding, int64_t divisor, int8_t, Out out),
      out.copy_(at::avg_pool2d_backward(grad, self, kernel, stride, padding, ceil_mode, count_padding,
                                        divisor_or_none(divisor))))

ACLNN(aclnnAdaptiveAvgPool2d, (In self, Integers size, Out out),
      out.copy_(at::_adaptive_avg_pool2d(self, size)))
ACLNN(aclnnAdaptiveAvgPool2dBackward, (In grad, In self, Out out),
      out.copy_(at::_adaptive_avg_pool2d_backward(grad, self)))
