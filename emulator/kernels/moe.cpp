// Mixtures of experts: tokens put in the order of their experts, and back.
//
// Each token goes to topk experts, so there are topk copies of it. positions says where in that order each copy is;
// copies whose position lies behind the last row were dropped.
#include "optional.h"

#include <stdexcept>

using namespace emulator;

static void refuse_padding(bool padded) {
  if (padded) throw std::invalid_argument("the padded mode is not supported, nor is it on hardware");
}

// The rows at these positions, and zeros for those that were dropped: by token, copy and channel.
static at::Tensor rows_at(In rows, In positions, int64_t topk) {
  at::Tensor with_dropped = at::cat({rows, at::zeros({1, rows.size(1)}, rows.options())});
  at::Tensor found = with_dropped.index_select(0, positions.clamp_max(rows.size(0)));
  return found.view({-1, topk, rows.size(1)});
}

static void permute(In tokens, In experts, bool padded, Out permuted, Out positions) {
  refuse_padding(padded);
  const int64_t topk = experts.dim() == 1 ? 1 : experts.size(1);
  at::Tensor order = at::argsort(experts.flatten(), /*stable=*/true, 0, false);
  positions.copy_(at::argsort(order, /*stable=*/true, 0, false));
  at::Tensor kept = order.slice(0, 0, permuted.size(0));
  permuted.copy_(tokens.index_select(0, kept.div(topk, "floor")));
}

static void permute_backward(In grad, In positions, int64_t topk, bool padded, Out grad_tokens) {
  refuse_padding(padded);
  grad_tokens.copy_(rows_at(wide(grad), positions, topk).sum(1));
}

ACLNN(aclnnMoeTokenPermute,
      (In tokens, In experts, int64_t, bool padded, Out permuted, Out positions),
      permute(tokens, experts, padded, permuted, positions))
ACLNN(aclnnMoeTokenPermuteGrad, (In grad, In positions, int64_t topk, bool padded, Out grad_tokens),
      permute_backward(grad, positions, topk, padded, grad_tokens))

// A token's copies are added up, each with its probability if there are some.
static void unpermute(In permuted, In positions, In probabilities, bool padded, Out tokens) {
  refuse_padding(padded);
  at::Tensor copies = rows_at(wide(permuted), positions, probabilities.defined() ? probabilities.size(1) : 1);
  if (probabilities.defined()) copies = copies * wide(probabilities).unsqueeze(-1);
  tokens.copy_(copies.sum(1));
}

static void unpermute_backward(In permuted, In grad, In positions, In probabilities, bool padded,
                               Out grad_permuted, Out grad_probabilities) {
  refuse_padding(padded);
  const int64_t rows = grad_permuted.size(0), channels = grad.size(1);
  at::Tensor of_copies = wide(grad).unsqueeze(1);
  if (probabilities.defined()) {
    at::Tensor copies = rows_at(wide(permuted), positions, probabilities.size(1));
    grad_probabilities.copy_((copies * of_copies).sum(-1));
    of_copies = of_copies * wide(probabilities).unsqueeze(-1);
  }
  at::Tensor with_dropped = at::zeros({rows + 1, channels}, of_copies.options());
  with_dropped.index_copy_(0, positions.clamp_max(rows).to(at::kLong), of_copies.reshape({-1, channels}));
  grad_permuted.copy_(with_dropped.slice(0, 0, rows));
}

ACLNN(aclnnMoeTokenUnpermute,
      (In permuted, In positions, In probabilities, bool padded, Integers, Out tokens),
      unpermute(permuted, positions, probabilities, padded, tokens))
ACLNN(aclnnMoeTokenUnpermuteGrad,
      (In permuted, In grad, In positions, In probabilities, bool padded, Integers, Out grad_permuted,
       Out grad_probabilities),
      unpermute_backward(permuted, grad, positions, probabilities, padded, grad_permuted, grad_probabilities))
