// Convolutions in one to three dimensions, also transposed ones. The int8_t, by which CANN may trade precision
// for speed, is ignored.
#include "kernel.h"

using namespace emulator;

static void convolution_backward(In grad, In input, In weight, Integers bias_sizes, Integers stride,
                                 Integers padding, Integers dilation, bool transposed,
                                 Integers output_padding, int64_t groups, Booleans wanted, Out grad_input,
                                 Out grad_weight, Out grad_bias) {
  auto [for_input, for_weight, for_bias] = at::convolution_backward(
      grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
      {wanted[0], wanted[1], wanted[2]});
  // The CPU may give a gradient that is not wanted, in a shape of its own.
  if (wanted[0]) grad_input.copy_(for_input);
  if (wanted[1]) grad_weight.copy_(for_weight);
  if (wanted[2]) grad_bias.copy_(for_bias);
}

ACLNN_OF(aclnnConvolution,
         (In input, In weight, In bias, Integers stride, Integers padding, Integers dilation, bool transposed,
          Integers output_padding, int64_t groups, Out out, int8_t),
         convolution(transposed ? input : out, weight, 1),
         out.copy_(at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding,
                                groups)))
ACLNN_OF(aclnnConvolutionBackward,
         (In grad, In input, In weight, Integers bias_sizes, Integers stride, Integers padding,
          Integers dilation, bool transposed, Integers output_padding, int64_t groups, Booleans wanted, int8_t,
          Out grad_input, Out grad_weight, Out grad_bias),
         convolution(transposed ? input : grad, weight, wanted[0] + wanted[1]),
         convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed,
                           output_padding, groups, wanted, grad_input, grad_weight, grad_bias))
