// Rotary positions: input * cos + rotated * sin, where rotated has the pairs (a, b) of the input as (-b, a).
#include "optional.h"

#include <stdexcept>

using namespace emulator;

// A pair is made of the two halves of the last dimension, or of neighbours in it.
static at::Tensor rotate(In input, int64_t mode) {
  using at::indexing::Ellipsis, at::indexing::None, at::indexing::Slice;
  if (mode == 0) {
    std::vector<at::Tensor> halves = input.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  if (mode == 1) {
    at::Tensor even = input.index({Ellipsis, Slice(0, None, 2)}), odd = input.index({Ellipsis, Slice(1, None, 2)});
    return at::stack({-odd, even}, -1).flatten(-2);
  }
  throw std::invalid_argument("rotary mode " + std::to_string(mode) + " is neither half nor interleave");
}

// A matrix, if there is one, says how to rotate.
static void rotary(In input, In cos, In sin, int64_t mode, In matrix, Out out) {
  at::Tensor x = wide(input);
  at::Tensor rotated = matrix.defined() ? at::matmul(x, wide(matrix)) : rotate(x, mode);
  out.copy_(wide(cos) * x + wide(sin) * rotated);
}

// Without an input nobody wants the gradients of cos and sin.
static void rotary_backward(In grad, In cos, In sin, In input, int64_t mode, Out grad_input, Out grad_cos,
                            Out grad_sin) {
  at::Tensor g = wide(grad);
  grad_input.copy_(g * wide(cos) - rotate(g * wide(sin), mode));
  if (!input.defined()) return;
  at::Tensor x = wide(input);
  copy_if_wanted(grad_cos, (g * x).sum_to_size(grad_cos.sizes()));
  copy_if_wanted(grad_sin, (g * rotate(x, mode)).sum_to_size(grad_sin.sizes()));
}

ACLNN(aclnnRotaryPositionEmbedding, (In input, In cos, In sin, int64_t mode, Out out),
      rotary(input, cos, sin, mode, {}, out))
ACLNN(aclnnRotaryPositionEmbeddingV2, (In input, In cos, In sin, int64_t mode, In matrix, Out out),
      rotary(input, cos, sin, mode, matrix, out))
ACLNN(aclnnRotaryPositionEmbeddingGrad,
      (In grad, In cos, In sin, In input, int64_t mode, Out grad_input, Out grad_cos, Out grad_sin),
      rotary_backward(grad, cos, sin, input, mode, grad_input, grad_cos, grad_sin))
