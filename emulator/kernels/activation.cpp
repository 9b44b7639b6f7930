// Activation functions and their derivatives.
#include "kernel.h"

using namespace emulator;

ACLNN(aclnnRelu, (In self, Out out), at::relu_out(out, self))
ACLNN(aclnnInplaceRelu, (Out self), self.relu_())
ACLNN(aclnnThreshold, (In self, Number threshold, Number value, Out out),
      at::threshold_out(out, self, threshold, value))
ACLNN(aclnnInplaceThreshold, (Out self, Number threshold, Number value),
      at::threshold_out(self, self, threshold, value))
ACLNN(aclnnThresholdBackward, (In grad, In self, Number threshold, Out out),
      at::threshold_backward_out(out, grad, self, threshold))

ACLNN(aclnnSilu, (In self, Out out), at::silu_out(out, self))
ACLNN(aclnnSiluBackward, (In grad, In self, Out out), at::silu_backward_out(out, grad, self))
ACLNN(aclnnTanhBackward, (In grad, In output, Out out), at::tanh_backward_out(out, grad, output))
ACLNN(aclnnSigmoidBackward, (In grad, In output, Out out), at::sigmoid_backward_out(out, grad, output))

ACLNN(aclnnGelu, (In self, Out out), at::gelu_out(out, self))
ACLNN(aclnnGeluBackward, (In grad, In self, Out out), at::gelu_backward_out(out, grad, self))
ACLNN(aclnnGeluV2, (In self, int64_t tanh, Out out), at::gelu_out(out, self, tanh ? "tanh" : "none"))
ACLNN(aclnnGeluBackwardV2, (In grad, In self, Text approximate, Out out),
      at::gelu_backward_out(out, grad, self, approximate))

static void swiglu_backward(In grad, In self, int64_t dim, Out out) {
  std::vector<at::Tensor> halves = self.chunk(2, dim);
  at::Tensor gate = at::silu_backward(grad * halves[1], halves[0]);
  out.copy_(at::cat({gate, grad * at::silu(halves[0])}, dim));
}

ACLNN(aclnnSwiGlu, (In self, int64_t dim, Out out),
      std::vector<at::Tensor> halves = self.chunk(2, dim); out.copy_(at::silu(halves[0]) * halves[1]))
ACLNN(aclnnSwiGluGrad, (In grad, In self, int64_t dim, Out out), swiglu_backward(grad, self, dim, out))
