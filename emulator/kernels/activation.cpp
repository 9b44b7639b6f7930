// Activation functions and their derivatives.
#include "kernel.h"

using namespace emulator;

ACLNN(aclnnRelu, (In self, Out out), at::relu_out(out, self))
ACLNN(aclnnInplaceRelu, (Update self), self.relu_())
ACLNN_AS(aclnnThreshold, (In self, Number threshold, Number value, Out out),
         threshold_out(out, self, threshold, value))
ACLNN_AS(aclnnInplaceThreshold, (Update self, Number threshold, Number value),
         threshold_out(self, self, threshold, value))
ACLNN_AS(aclnnThresholdBackward, (In grad, In self, Number threshold, Out out),
         threshold_backward_out(out, grad, self, threshold))

ACLNN_AS(aclnnSilu, (In self, Out out), silu_out(out, self))
ACLNN_AS(aclnnSiluBackward, (In grad, In self, Out out), silu_backward_out(out, grad, self))
ACLNN_AS(aclnnSoftplus, (In self, Number beta, Number threshold, Out out), softplus_out(out, self, beta, threshold))
ACLNN_AS(aclnnSoftplusBackward, (In grad, In self, Number beta, Number threshold, Out out),
         softplus_backward_out(out, grad, self, beta, threshold))
ACLNN_AS(aclnnTanhBackward, (In grad, In output, Out out), tanh_backward_out(out, grad, output))
ACLNN_AS(aclnnSigmoidBackward, (In grad, In output, Out out), sigmoid_backward_out(out, grad, output))

ACLNN(aclnnHardswish, (In self, Out out), at::hardswish_out(out, self))
ACLNN(aclnnInplaceHardswish, (Update self), at::hardswish_(self))
ACLNN(aclnnHardswishBackward, (In grad, In self, Out out), out.copy_(at::hardswish_backward(grad, self)))
ACLNN(aclnnHardswishBackwardV2, (In grad, In self, Out out), out.copy_(at::hardswish_backward(grad, self)))
ACLNN_AS(aclnnHardsigmoid, (In self, Out out), hardsigmoid_out(out, self))
ACLNN_AS(aclnnInplaceHardsigmoid, (Update self), hardsigmoid_(self))
ACLNN_AS(aclnnHardsigmoidBackward, (In grad, In self, Out out), hardsigmoid_backward_out(out, grad, self))
ACLNN(aclnnHardtanh, (In self, Number low, Number high, Out out), at::hardtanh_out(out, self, low, high))
ACLNN(aclnnInplaceHardtanh, (Update self, Number low, Number high), at::hardtanh_(self, low, high))
ACLNN(aclnnHardtanhBackward, (In grad, In self, Number low, Number high, Out out),
      at::hardtanh_backward_out(out, grad, self, low, high))

ACLNN_AS(aclnnLeakyRelu, (In self, Number slope, Out out), leaky_relu_out(out, self, slope))
ACLNN_AS(aclnnInplaceLeakyRelu, (Update self, Number slope), leaky_relu_(self, slope))
ACLNN_AS(aclnnLeakyReluBackward, (In grad, In self, Number slope, bool self_is_result, Out out),
         leaky_relu_backward_out(out, grad, self, slope, self_is_result))
ACLNN_AS(aclnnElu, (In self, Number alpha, Number scale, Number input_scale, Out out),
         elu_out(out, self, alpha, scale, input_scale))
ACLNN_AS(aclnnInplaceElu, (Update self, Number alpha, Number scale, Number input_scale),
         elu_(self, alpha, scale, input_scale))
ACLNN(aclnnEluBackward,
      (In grad, Number alpha, Number scale, Number input_scale, bool is_result, In self_or_result, Out out),
      at::elu_backward_out(out, grad, alpha, scale, input_scale, is_result, self_or_result))
ACLNN_AS(aclnnMish, (In self, Out out), mish_out(out, self))
ACLNN_AS(aclnnInplaceMish, (Update self), mish_(self))
ACLNN(aclnnMishBackward, (In grad, In self, Out out), out.copy_(at::mish_backward(grad, self)))

// CANN keeps nothing for the backward pass, where the CPU keeps a tensor of intermediate results.
ACLNN(aclnnLogSigmoid, (In self, Out out), out.copy_(at::log_sigmoid(self)))
ACLNN(aclnnLogSigmoidForward, (In self, Out out, Out), out.copy_(at::log_sigmoid(self)))
ACLNN(aclnnLogSigmoidBackward, (In grad, In self, In, Out out),
      out.copy_(at::log_sigmoid_backward(grad, self, std::get<1>(at::log_sigmoid_forward(self)))))
ACLNN_AS(aclnnGlu, (In self, int64_t dim, Out out), glu_out(out, self, dim))
ACLNN(aclnnGluBackward, (In grad, In self, int64_t dim, Out out), at::glu_backward_out(out, grad, self, dim))

ACLNN_AS(aclnnGelu, (In self, Out out), gelu_out(out, self))
ACLNN_AS(aclnnGeluBackward, (In grad, In self, Out out), gelu_backward_out(out, grad, self))
ACLNN_AS(aclnnGeluV2, (In self, int64_t tanh, Out out), gelu_out(out, self, tanh ? "tanh" : "none"))
ACLNN_AS(aclnnGeluBackwardV2, (In grad, In self, Text approximate, Out out),
         gelu_backward_out(out, grad, self, approximate))

// x * sigmoid(1.702 * x)
static at::Tensor fast_gelu(In x) { return x * (x * 1.702).sigmoid(); }

static at::Tensor fast_gelu_backward(In grad, In x) {
  at::Tensor gate = (x * 1.702).sigmoid();
  return grad * gate * (x * (1 - gate) * 1.702 + 1);
}

ACLNN(aclnnFastGelu, (In self, Out out), out.copy_(fast_gelu(wide(self))))
ACLNN(aclnnFastGeluBackward, (In grad, In self, Out out), out.copy_(fast_gelu_backward(wide(grad), wide(self))))

// One half of the input by the gelu of the other, the gate.
static void geglu(In self, int64_t dim, int64_t tanh, bool gate_is_left, Out out, Out out_gelu) {
  std::vector<at::Tensor> halves = wide(self).chunk(2, dim);
  at::Tensor gelu = at::gelu(halves[gate_is_left ? 0 : 1], tanh ? "tanh" : "none");
  out_gelu.copy_(gelu);
  out.copy_(halves[gate_is_left ? 1 : 0] * gelu);
}

static void geglu_backward(In grad, In self, In gelu, int64_t dim, int64_t tanh, bool gate_is_left, Out out) {
  std::vector<at::Tensor> halves = wide(self).chunk(2, dim);
  std::vector<at::Tensor> grads(2);
  const size_t gate = gate_is_left ? 0 : 1;
  grads[gate] = at::gelu_backward(wide(grad) * halves[1 - gate], halves[gate], tanh ? "tanh" : "none");
  grads[1 - gate] = wide(grad) * wide(gelu);
  out.copy_(at::cat(grads, dim));
}

ACLNN(aclnnGeGluV3, (In self, int64_t dim, int64_t tanh, bool gate_is_left, Out out, Out gelu),
      geglu(self, dim, tanh, gate_is_left, out, gelu))
ACLNN(aclnnGeGluV3Backward,
      (In grad, In self, In gelu, int64_t dim, int64_t tanh, bool gate_is_left, Out out),
      geglu_backward(grad, self, gelu, dim, tanh, gate_is_left, out))

static void swiglu_backward(In grad, In self, int64_t dim, Out out) {
  std::vector<at::Tensor> halves = self.chunk(2, dim);
  at::Tensor gate = at::silu_backward(grad * halves[1], halves[0]);
  out.copy_(at::cat({gate, grad * at::silu(halves[0])}, dim));
}

ACLNN(aclnnSwiGlu, (In self, int64_t dim, Out out),
      std::vector<at::Tensor> halves = self.chunk(2, dim); out.copy_(at::silu(halves[0]) * halves[1]))
ACLNN(aclnnSwiGluGrad, (In grad, In self, int64_t dim, Out out), swiglu_backward(grad, self, dim, out))
