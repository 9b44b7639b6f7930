// Losses and their derivatives.
#include "kernel.h"

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
