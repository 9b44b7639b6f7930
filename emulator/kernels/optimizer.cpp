// Fused optimizer steps.
#include "optional.h"

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
      (Update parameter, Update mean, Update square, Update max_square, In grad, In step, float lr, float beta1,
       float beta2, float decay, float eps, bool amsgrad, bool maximize),
      adamw(parameter, mean, square, max_square, grad, step, lr, beta1, beta2, decay, eps, amsgrad, maximize))

// Gradients are written too where they come scaled. The first step makes the momentum buffers.
ACLNN(aclnnFusedSgd,
      (Updates parameters, Updates grads, Updates momentum_buffers, In grad_scale, float decay, float momentum,
       float lr, float dampening, bool nesterov, bool maximize, bool is_first_step),
      at::_fused_sgd_(parameters, grads, momentum_buffers, decay, momentum, lr, dampening, nesterov, maximize,
                      is_first_step, if_defined(grad_scale)))
