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
