// Losses and their derivatives.
#include "kernel.h"

#include <limits>
#include <stdexcept>

using namespace emulator;

static void nll_loss(In self, In target, In weight, int64_t reduction, int64_t ignored, Out out,
                     Out total_weight) {
  auto [loss, total] = at::nll_loss_forward(self, target, weight, reduction, ignored);
  out.copy_(loss);
  total_weight.copy_(total);
}

ACLNN(aclnnNLLLoss,
      (In self, In target, In weight, int64_t reduction, int64_t ignored, Out out, Out total_weight),
      nll_loss(self, target, weight, reduction, ignored, out, total_weight))
ACLNN(aclnnNLLLossBackward,
      (In grad, In self, In target, In weight, int64_t reduction, int64_t ignored, In total_weight, Out out),
      out.copy_(at::nll_loss_backward(grad, self, target, weight, reduction, ignored, total_weight)))

ACLNN(aclnnMseLoss, (In self, In target, int64_t reduction, Out out),
      out.copy_(at::mse_loss(self, target, reduction)))
ACLNN(aclnnMseLossBackward, (In grad, In self, In target, int64_t reduction, Out out),
      out.copy_(at::mse_loss_backward(grad, self, target, reduction)))

ACLNN(aclnnSmoothL1Loss, (In self, In target, int64_t reduction, float beta, Out out),
      out.copy_(at::smooth_l1_loss(self, target, reduction, beta)))
// Torch 2.9 has this for float16 on no CPU.
ACLNN(aclnnSmoothL1LossBackward, (In grad, In self, In target, int64_t reduction, float beta, Out out),
      out.copy_(at::smooth_l1_loss_backward(wide(grad), wide(self), wide(target), reduction, beta)))

static int64_t reduction_by(Text name) {
  if (name == "none") return at::Reduction::None;
  return name == "mean" ? at::Reduction::Mean : at::Reduction::Sum;
}

// CANN ignores no label if the one to ignore is negative; then no target may be.
static void cross_entropy(In input, In target, In weight, Text reduction, int64_t ignored, double smoothing,
                          bool with_z_loss, Out loss, Out log_prob) {
  if (with_z_loss) throw std::invalid_argument("the z-loss is not supported, nor is it on hardware");
  const int64_t none = std::numeric_limits<int64_t>::min();
  loss.copy_(at::cross_entropy_loss(wide(input), target, weight, reduction_by(reduction),
                                    ignored < 0 ? none : ignored, smoothing));
  log_prob.copy_(at::log_softmax(wide(input), 1));
}

// The loss is a sum over rows and labels of log_prob times a factor; the factors are its derivative by log_prob.
static void cross_entropy_backward(In grad, In log_prob, In target, In weight, Text reduction, int64_t ignored,
                                   double smoothing, Out out) {
  at::Tensor logs = wide(log_prob);
  at::Tensor weights = weight.defined() ? weight.to(logs.scalar_type()) : at::ones(logs.size(1), logs.options());
  at::Tensor kept = target.ne(ignored).to(logs.scalar_type());
  at::Tensor of_target = weights.index_select(0, target) * kept;
  at::Tensor scale = wide(grad);
  if (reduction == "mean") scale = scale / of_target.sum();
  at::Tensor factors = (scale * kept).unsqueeze(1) * weights * (-smoothing / logs.size(1));
  factors.scatter_add_(1, target.unsqueeze(1), ((smoothing - 1) * of_target * scale).unsqueeze(1));
  out.copy_(at::_log_softmax_backward_data(factors, logs, 1, logs.scalar_type()));
}

ACLNN(aclnnCrossEntropyLoss,
      (In input, In target, In weight, Text reduction, int64_t ignored, double smoothing, double z_scale,
       bool z_loss, Out loss, Out log_prob, Out, Out),
      cross_entropy(input, target, weight, reduction, ignored, smoothing, z_loss || z_scale != 0, loss, log_prob))
ACLNN(aclnnCrossEntropyLossGrad,
      (In grad, In log_prob, In target, In weight, In, In, Text reduction, int64_t ignored, double smoothing, double,
       Out out),
      cross_entropy_backward(grad, log_prob, target, weight, reduction, ignored, smoothing, out))

// With s = sigmoid(x) and p the weight of the positive class, one element's derivative is
// (p * y + 1 - y) * s - p * y.
static void logits_loss_backward(In grad, In self, In target, In weight, In positive_weight,
                                 int64_t reduction, Out out) {
  at::Tensor probability = self.sigmoid();
  at::Tensor result = probability - target;
  if (positive_weight.defined()) {
    at::Tensor scaled = positive_weight * target;
    result = (scaled + 1 - target) * probability - scaled;
  }
  result = result * grad;
  if (weight.defined()) result = result * weight;
  if (reduction == at::Reduction::Mean) result = result / self.numel();
  out.copy_(result);
}

ACLNN(aclnnBinaryCrossEntropyWithLogits,
      (In self, In target, In weight, In positive_weight, int64_t reduction, Out out),
      out.copy_(at::binary_cross_entropy_with_logits(self, target, weight, positive_weight, reduction)))
ACLNN(aclnnBinaryCrossEntropyWithLogitsBackward,
      (In grad, In self, In target, In weight, In positive_weight, int64_t reduction, Out out),
      logits_loss_backward(grad, self, target, weight, positive_weight, reduction, out))
