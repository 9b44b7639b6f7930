// Fused attention, as F.scaled_dot_product_attention reaches it, computed in float step by step.
#include "dropout.h"

#include <limits>

using namespace emulator;

namespace {

constexpr double kMasked = -std::numeric_limits<double>::infinity();

// What CANN calls sparse_mode: which keys a query may see.
enum SparseMode : int64_t { kGivenMask = 0, kWholeMask = 1, kCausalFromStart = 2, kCausalFromEnd = 3 };

// [batch, heads, positions, depth], whatever the layout.
at::Tensor by_heads(In tensor, const std::string& layout, int64_t heads) {
  if (layout == "BNSD") return tensor;
  if (layout == "BSND") return tensor.transpose(1, 2);
  if (layout == "BSH") return tensor.unflatten(2, {heads, -1}).transpose(1, 2);
  if (layout == "SBH") return tensor.unflatten(2, {heads, -1}).permute({1, 2, 0, 3});
  TORCH_CHECK_NOT_IMPLEMENTED(false, "attention layout ", layout);
}

// Keys and values may have fewer heads than queries, and their layout may not tell how many.
int64_t count_heads(In tensor, const std::string& layout, int64_t depth) {
  if (layout == "BNSD") return tensor.size(1);
  if (layout == "BSND") return tensor.size(2);
  return tensor.size(2) / depth;
}

// The mask of the pairs that do not attend to each other, or an undefined tensor if all do.
at::Tensor hidden_pairs(In given, int64_t mode, int64_t queries, int64_t keys) {
  auto later_than = [&](int64_t diagonal) { return at::ones({queries, keys}, at::kBool).triu(diagonal); };
  switch (mode) {
    case kGivenMask:
    case kWholeMask: return given.defined() ? given.to(at::kBool) : given;
    case kCausalFromStart: return later_than(1);
    case kCausalFromEnd: return later_than(1 + keys - queries);
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, "attention sparse mode ", mode);
  }
}

// One attention problem with its inputs in float and a copy of each key and value head for each of the query
// heads that share it.
struct Attention {
  at::Tensor query, key, value, scores;

  Attention(In q, In k, In v, In bias, In padding, In mask, double scale, int64_t heads, Text layout,
            int64_t mode) {
    TORCH_CHECK_NOT_IMPLEMENTED(!padding.defined(), "attention with a padding mask");
    query = by_heads(q, layout, heads).to(at::kFloat);
    int64_t key_heads = count_heads(k, layout, query.size(3));
    int64_t group = heads / key_heads;
    key = by_heads(k, layout, key_heads).to(at::kFloat).repeat_interleave(group, 1);
    value = by_heads(v, layout, key_heads).to(at::kFloat).repeat_interleave(group, 1);
    scores = at::matmul(query, key.transpose(2, 3)).mul_(scale);
    if (bias.defined()) scores.add_(bias);
    at::Tensor hidden = hidden_pairs(mask, mode, query.size(2), key.size(2));
    if (hidden.defined()) scores.masked_fill_(hidden, kMasked);
  }

  // A query that sees no key at all gives zero.
  at::Tensor probabilities(In maximum, In sum) const {
    return (scores - maximum).exp_().div_(sum.masked_fill(sum == 0, 1));
  }
};

at::Tensor dropped(In probabilities, In mask, double keep) {
  if (!mask.defined()) return probabilities;
  return probabilities * unpack_dropout_mask(mask, probabilities.sizes()) / keep;
}

void forward(In q, In k, In v, In bias, In dropout_mask, In padding, In mask, double scale, double keep,
             int64_t heads, Text layout, int64_t mode, Out maximum, Out sum, Out out) {
  Attention attention(q, k, v, bias, padding, mask, scale, heads, layout, mode);
  at::Tensor highest = attention.scores.amax(-1, true);
  highest.masked_fill_(highest == kMasked, 0);
  at::Tensor total = (attention.scores - highest).exp_().sum(-1, true);
  maximum.copy_(highest.expand_as(maximum));
  sum.copy_(total.expand_as(sum));
  at::Tensor weights = dropped(attention.probabilities(highest, total), dropout_mask, keep);
  by_heads(out, layout, heads).copy_(at::matmul(weights, attention.value));
}

// Heads that share a key or a value add up their gradients.
void store_shared(In gradient, const std::string& layout, Out out, int64_t depth) {
  int64_t heads = count_heads(out, layout, depth);
  by_heads(out, layout, heads).copy_(gradient.unflatten(1, {heads, -1}).sum(2));
}

void backward(In q, In k, In v, In grad, In bias, In dropout_mask, In padding, In mask, In maximum, In sum,
              double scale, double keep, int64_t heads, Text layout, int64_t mode, Out grad_q, Out grad_k,
              Out grad_v, Out grad_bias) {
  Attention attention(q, k, v, bias, padding, mask, scale, heads, layout, mode);
  at::Tensor weights = attention.probabilities(maximum.narrow(-1, 0, 1), sum.narrow(-1, 0, 1));
  at::Tensor grad_out = by_heads(grad, layout, heads).to(at::kFloat);
  at::Tensor grad_kept = at::matmul(grad_out, attention.value.transpose(2, 3));
  at::Tensor grad_weights = dropped(grad_kept, dropout_mask, keep);
  at::Tensor grad_scores = at::_softmax_backward_data(grad_weights, weights, -1, at::kFloat);
  int64_t depth = attention.query.size(3);
  by_heads(grad_q, layout, heads).copy_(at::matmul(grad_scores, attention.key).mul_(scale));
  store_shared(at::matmul(grad_scores.transpose(2, 3), attention.query).mul_(scale), layout, grad_k, depth);
  at::Tensor kept_weights = dropped(weights, dropout_mask, keep);
  store_shared(at::matmul(kept_weights.transpose(2, 3), grad_out), layout, grad_v, attention.value.size(3));
  if (bias.defined()) grad_bias.copy_(grad_scores.sum_to_size(grad_bias.sizes()));
}

// A causal mask is a pattern of which the kernel needs a corner, whatever its size. The backward pass has a gradient of
// each tensor beside it.
Work work_of(In q, In k, In v, In out, In mask, int64_t heads, Text layout, int64_t mode, bool is_backward) {
  const at::Tensor query = by_heads(q, layout, heads);
  const int64_t key_heads = count_heads(k, layout, query.size(3));
  const double keys = by_heads(k, layout, key_heads).size(2);
  const double pairs = keys * query.size(0) * query.size(1) * query.size(2);
  const double depths = query.size(3) + by_heads(v, layout, key_heads).size(3);
  const bool causal = mode == kCausalFromStart || mode == kCausalFromEnd;
  const double nbytes = (bytes_of(q) + bytes_of(k) + bytes_of(v) + bytes_of(out)) * (is_backward ? 2 : 1);
  return attention(q, pairs, depths, causal, is_backward, nbytes + (causal ? 0 : bytes_of(mask)));
}

}  // namespace

ACLNN_OF(aclnnFlashAttentionScore,
         (In q, In k, In v, In bias, In dropout_mask, In padding, In mask, Integers, double scale, double keep,
          int64_t, int64_t, int64_t heads, Text layout, int64_t, int64_t mode, Out maximum, Out sum, Out,
          Out out),
         work_of(q, k, v, out, mask, heads, layout, mode, false),
         forward(q, k, v, bias, dropout_mask, padding, mask, scale, keep, heads, layout, mode, maximum, sum,
              out))

ACLNN_OF(aclnnFlashAttentionScoreGrad,
         (In q, In k, In v, In grad, In bias, In dropout_mask, In padding, In mask, In maximum, In sum, In, In,
          Integers, double scale, double keep, int64_t, int64_t, int64_t heads, Text layout, int64_t,
          int64_t mode, Out grad_q, Out grad_k, Out grad_v, Out grad_bias),
         work_of(q, k, v, grad, mask, heads, layout, mode, true),
         backward(q, k, v, grad, bias, dropout_mask, padding, mask, maximum, sum, scale, keep, heads, layout,
               mode, grad_q, grad_k, grad_v, grad_bias))
