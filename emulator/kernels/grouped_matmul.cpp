// Many matrix products by one call, such as one for each expert.
#include "kernel.h"

#include <stdexcept>

using namespace emulator;

enum class GroupType : int64_t { none = -1, rows = 0, inner = 2 };  // what of the first factor a group is

// Where each group ends.
static std::vector<int64_t> ends_of(In groups, int64_t type) {
  if (!groups.defined()) return {};
  if (type != 0 && type != 1) throw std::invalid_argument("group_list_type must be 0 or 1");
  at::Tensor ends = (type == 0 ? groups : groups.cumsum(0)).to(at::kLong).contiguous();
  return {ends.const_data_ptr<int64_t>(), ends.const_data_ptr<int64_t>() + ends.numel()};
}

static at::Tensor activate(In x, int64_t activation) {
  switch (activation) {
    case 0: return x;
    case 1: return x.relu();
    case 2: return at::gelu(x, "tanh");
    case 4: return x * (x * 1.702).sigmoid();
    case 5: return at::silu(x);
    default: throw std::invalid_argument("act_type must be 0, 1, 2, 4 or 5");
  }
}

// The i-th of a list, or of one tensor that has all of them.
static at::Tensor each(Ins tensors, int64_t dimensions, int64_t i) {
  if (tensors.empty()) return {};
  return tensors.size() == 1 && tensors[0].dim() > dimensions ? tensors[0][i] : tensors.at(i);
}

static void multiply(In x, In weight, In bias, int64_t activation, at::Tensor out) {
  const at::Tensor product = at::matmul(wide(x), wide(weight));
  out.copy_(activate(bias.defined() ? product + wide(bias) : product, activation));
}

static void grouped_matmul(Ins x, Ins weight, Ins bias, const std::vector<int64_t>& ends, GroupType type,
                           int64_t activation, Outs out) {
  const auto begin = [&ends](size_t i) { return i == 0 ? 0 : ends[i - 1]; };
  if (type == GroupType::inner) {
    for (size_t i = 0; i < ends.size(); ++i) {
      multiply(x.at(0).slice(1, begin(i), ends[i]), weight.at(0).slice(0, begin(i), ends[i]), each(bias, 1, i),
               activation, out.at(0)[i]);
    }
    return;
  }
  const bool one_factor = x.size() == 1 && !ends.empty();
  const size_t groups = one_factor ? ends.size() : x.size();
  int64_t row = 0;
  for (size_t i = 0; i < groups; ++i) {
    at::Tensor factor = one_factor ? x[0].slice(0, begin(i), ends[i]) : x[i];
    at::Tensor part = out.size() == 1 && groups > 1 ? out[0].slice(0, row, row + factor.size(0)) : out.at(i);
    multiply(factor, each(weight, 2, i), each(bias, 1, i), activation, part);
    row += factor.size(0);
  }
}

template <class... Lists>
static void refuse_quantised(const Lists&... lists) {
  if ((!lists.empty() || ...)) throw std::invalid_argument("the emulated NPU multiplies no quantised groups");
}

static void by_tensor(Ins x, Ins weight, Ins bias, In groups, int64_t group_type, int64_t list_type,
                      int64_t activation, Outs out) {
  grouped_matmul(x, weight, bias, ends_of(groups, list_type), GroupType{group_type}, activation, out);
}

ACLNN_OF(aclnnGroupedMatmul,
         (Ins x, Ins weight, Ins bias, Ins scale, Ins offset, Ins anti_scale, Ins anti_offset, Integers ends, int64_t,
          Outs out),
         grouped_product(x, weight),
         refuse_quantised(scale, offset, anti_scale, anti_offset);
         grouped_matmul(x, weight, bias, ends, GroupType::rows, 0, out))
ACLNN_OF(aclnnGroupedMatmulV4,
         (Ins x, Ins weight, Ins bias, Ins scale, Ins offset, Ins anti_scale, Ins anti_offset, Ins token_scale,
          In groups, Ins, Ins, Ins, int64_t, int64_t group_type, int64_t list_type, int64_t activation, Outs out, Outs,
          Outs),
         grouped_product(x, weight),
         refuse_quantised(scale, offset, anti_scale, anti_offset, token_scale);
         by_tensor(x, weight, bias, groups, group_type, list_type, activation, out))
