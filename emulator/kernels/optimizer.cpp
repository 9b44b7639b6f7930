// Fused optimizer steps.
#include "kernel.h"

using namespace emulator;

// The step tensor counts the steps before this one.
static void adamw(Out parameter, Out mean, Out square, Out max_square, In grad, In step, float lr,
                  float beta1, float beta2, float decay, float eps, bool amsgrad, bool maximize) {
  std::vector<at::Tensor> max_squares;
  if (amsgrad) max_squares.push_back(max_square);
  at::_fused_adamw_({parameter}, {grad}, {mean}, {square}, max_squares, {step.to(at::kFloat) + 1}, lr, beta1,
                    beta2, decay, eps, amsgrad, maximize);
}

ACLNN(aclnnApplyAdamWV2,
      (Out parameter, Out mean, Out square, Out max_square, In grad, In step, float lr, float beta1,
       float beta2, float decay, float eps, bool amsgrad, bool maximize),
      adamw(parameter, mean, square, max_square, grad, step, lr, beta1, beta2, decay, eps, amsgrad, maximize))
