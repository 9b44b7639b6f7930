// Softmax and the normalisations, with their derivatives.
#include "optional.h"

using namespace emulator;

// The output's dtype may be wider than the input's.
ACLNN_OF(aclnnSoftmax, (In self, int64_t dim, Out out), softmax(),
         at::_softmax_out(out, self.to(out.scalar_type()), dim, false))
ACLNN_OF(aclnnLogSoftmax, (In self, int64_t dim, Out out), softmax(),
         at::_log_softmax_out(out, self.to(out.scalar_type()), dim, false))
ACLNN_OF(aclnnSoftmaxBackward, (In grad, In output, int64_t dim, Out out), softmax(),
         out.copy_(at::_softmax_backward_data(grad, output, dim, output.scalar_type())))
ACLNN_OF(aclnnLogSoftmaxBackward, (In grad, In output, int64_t dim, Out out), softmax(),
         out.copy_(at::_log_softmax_backward_data(grad, output, dim, output.scalar_type())))

// CANN keeps mean and rstd in float for half-width inputs; the CPU kernels keep them in the inputs' dtype.
static void layer_norm(In input, Integers shape, In weight, In bias, double eps, Out out, Out mean,
                       Out rstd) {
  out.copy_(std::get<0>(at::native_layer_norm(input, shape, weight, bias, eps)));
  if (!mean.defined()) return;
  auto [_, wide_mean, wide_rstd] = at::native_layer_norm(input.to(mean.scalar_type()), shape, {}, {}, eps);
  mean.copy_(wide_mean.reshape(mean.sizes()));
  rstd.copy_(wide_rstd.reshape(rstd.sizes()));
}

ACLNN(aclnnLayerNorm, (In input, Integers shape, In weight, In bias, double eps, Out out, Out mean, Out rstd),
      layer_norm(input, shape, weight, bias, eps, out, mean, rstd))
ACLNN(aclnnFastLayerNorm,
      (In input, Integers shape, In weight, In bias, double eps, Out out, Out mean, Out rstd),
      layer_norm(input, shape, weight, bias, eps, out, mean, rstd))

static void layer_norm_backward(In grad, In input, Integers shape, In mean, In rstd, In weight, In bias,
                                Out grad_input, Out grad_weight, Out grad_bias) {
  at::ScalarType dtype = weight.scalar_type() == input.scalar_type() ? input.scalar_type() : at::kFloat;
  auto [for_input, for_weight, for_bias] = at::native_layer_norm_backward(
      grad, input, shape, mean.to(dtype), rstd.to(dtype), weight, bias, {true, true, true});
  copy_if_wanted(grad_input, for_input);
  copy_if_wanted(grad_weight, for_weight);
  copy_if_wanted(grad_bias, for_bias);
}

ACLNN(aclnnLayerNormBackward,
      (In grad, In input, Integers shape, In mean, In rstd, In weight, In bias, Booleans, Out grad_input,
       Out grad_weight, Out grad_bias),
      layer_norm_backward(grad, input, shape, mean, rstd, weight, bias, grad_input, grad_weight, grad_bias))

static void group_norm(In input, In weight, In bias, int64_t n, int64_t c, int64_t hxw, int64_t groups, double eps,
                       Out out, Out mean, Out rstd) {
  auto [normed, means, rstds] = at::native_group_norm(input, weight, bias, n, c, hxw, groups, eps);
  out.copy_(normed);
  mean.copy_(means);
  rstd.copy_(rstds);
}

static void group_norm_backward(In grad, In input, In mean, In rstd, In weight, int64_t n, int64_t c, int64_t hxw,
                                int64_t groups, Out grad_input, Out grad_weight, Out grad_bias) {
  at::ScalarType dtype = weight.defined() ? weight.scalar_type() : input.scalar_type();
  auto [for_input, for_weight, for_bias] = at::native_group_norm_backward(
      grad, input, mean.to(dtype), rstd.to(dtype), weight, n, c, hxw, groups,
      {grad_input.defined(), grad_weight.defined(), grad_bias.defined()});
  copy_if_wanted(grad_input, for_input);
  copy_if_wanted(grad_weight, for_weight);
  copy_if_wanted(grad_bias, for_bias);
}

ACLNN(aclnnGroupNorm,
      (In input, In weight, In bias, int64_t n, int64_t c, int64_t hxw, int64_t groups, double eps, Out out,
       Out mean, Out rstd),
      group_norm(input, weight, bias, n, c, hxw, groups, eps, out, mean, rstd))
ACLNN(aclnnGroupNormBackward,
      (In grad, In input, In mean, In rstd, In weight, int64_t n, int64_t c, int64_t hxw, int64_t groups, Booleans,
       Out grad_input, Out grad_weight, Out grad_bias),
      group_norm_backward(grad, input, mean, rstd, weight, n, c, hxw, groups, grad_input, grad_weight, grad_bias))

// The input over its root mean square over the last dimensions, which are those of gamma.
static std::vector<int64_t> dims_of(In gamma) {
  std::vector<int64_t> dims;
  for (int64_t i = 1; i <= gamma.dim(); ++i) dims.push_back(-i);
  return dims;
}

static void rms_norm(In self, In gamma, double eps, Out out, Out rstd) {
  at::Tensor wide = self.to(at::kFloat);
  at::Tensor inverse = wide.square().mean(dims_of(gamma), true).add(eps).rsqrt();
  out.copy_(wide * inverse * gamma.to(at::kFloat));
  rstd.copy_(inverse.reshape(rstd.sizes()));
}

static void rms_norm_backward(In grad, In self, In rstd, In gamma, Out grad_self, Out grad_gamma) {
  at::Tensor inverse = rstd;
  while (inverse.dim() < self.dim()) inverse = inverse.unsqueeze(-1);
  at::Tensor normalised = self.to(at::kFloat) * inverse;
  at::Tensor wide_grad = grad.to(at::kFloat);
  at::Tensor scaled = wide_grad * gamma.to(at::kFloat);
  at::Tensor projection = (scaled * normalised).mean(dims_of(gamma), true);
  grad_self.copy_((scaled - normalised * projection) * inverse);
  grad_gamma.copy_((wide_grad * normalised).sum_to_size(gamma.sizes()));
}

ACLNN(aclnnRmsNorm, (In self, In gamma, double eps, Out out, Out rstd), rms_norm(self, gamma, eps, out, rstd))
ACLNN(aclnnRmsNormGrad, (In grad, In self, In rstd, In gamma, Out grad_self, Out grad_gamma),
      rms_norm_backward(grad, self, rstd, gamma, grad_self, grad_gamma))
