// Batch normalisation. CANN keeps the batch's mean and rstd, and the gradients of weight and bias, in float.
#include "optional.h"

using namespace emulator;

static void train(In input, In weight, In bias, Out running_mean, Out running_var, double momentum,
                  double eps, Out out, Out mean, Out rstd) {
  auto [result, batch_mean, batch_rstd] =
      at::native_batch_norm(input, weight, bias, running_mean, running_var, true, momentum, eps);
  out.copy_(result);
  mean.copy_(batch_mean);
  rstd.copy_(batch_rstd);
}

ACLNN(aclnnBatchNormTraining,
      (In input, In weight, In bias, Out running_mean, Out running_var, bool, double momentum, double eps,
       Out out, Out mean, Out rstd),
      train(input, weight, bias, running_mean, running_var, momentum, eps, out, mean, rstd))
ACLNN(aclnnBatchNormEvaluation,
      (In input, In weight, In bias, In running_mean, In running_var, bool, double momentum, double eps,
       Out out, Out, Out),
      out.copy_(std::get<0>(
          at::native_batch_norm(input, weight, bias, running_mean, running_var, false, momentum, eps))))

// CANN has one function for both. They are two here because only training writes the running statistics.
ACL_EXPORT aclError aclnnBatchNormGetWorkspaceSize(const aclTensor* input, const aclTensor* weight,
                                                   const aclTensor* bias, aclTensor* running_mean,
                                                   aclTensor* running_var, bool training, double momentum,
                                                   double eps, aclTensor* out, aclTensor* mean,
                                                   aclTensor* rstd, uint64_t* workspace_size,
                                                   aclOpExecutor** executor) {
  auto plan = [&](auto planner) {
    return planner(input, weight, bias, running_mean, running_var, training, momentum, eps, out, mean, rstd,
                   workspace_size, executor);
  };
  return training ? plan(aclnnBatchNormTrainingGetWorkspaceSize)
                  : plan(aclnnBatchNormEvaluationGetWorkspaceSize);
}

ACL_EXPORT aclError aclnnBatchNorm(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return launch(executor, stream);
}

// The CPU kernels want mean and rstd in the dtype of the parameters.
static at::ScalarType parameter_dtype(In weight, In running_mean, In input) {
  for (const at::Tensor& each : {weight, running_mean}) {
    if (each.defined()) return each.scalar_type();
  }
  return input.scalar_type();
}

static void batch_norm_backward(In grad, In input, In weight, In running_mean, In running_var, In mean,
                                In rstd, bool training, double eps, Booleans wanted, Out grad_input,
                                Out grad_weight, Out grad_bias) {
  at::ScalarType dtype = parameter_dtype(weight, running_mean, input);
  auto [for_input, for_weight, for_bias] = at::native_batch_norm_backward(
      grad, input, weight, running_mean, running_var, mean.to(dtype), rstd.to(dtype), training, eps,
      {wanted[0], wanted[1], wanted[2]});
  copy_if_wanted(grad_input, for_input);
  copy_if_wanted(grad_weight, for_weight);
  copy_if_wanted(grad_bias, for_bias);
}

ACLNN(aclnnBatchNormBackward,
      (In grad, In input, In weight, In running_mean, In running_var, In mean, In rstd, bool training,
       double eps, Booleans wanted, Out grad_input, Out grad_weight, Out grad_bias),
      batch_norm_backward(grad, input, weight, running_mean, running_var, mean, rstd, training, eps, wanted,
                          grad_input, grad_weight, grad_bias))
