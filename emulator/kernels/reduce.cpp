// Sums, extremes and norms over dimensions. No dimensions means all of them.
#include "kernel.h"

#include <numeric>

using namespace emulator;

static std::vector<int64_t> all_if_none(Integers dims, In self) {
  if (!dims.empty()) return dims;
  std::vector<int64_t> all(self.dim());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

ACLNN_AS(aclnnReduceSum, (In self, Integers dims, bool keepdim, aclDataType, Out out),
         sum_out(out, self, dims, keepdim, out.scalar_type()))
ACLNN_AS(aclnnMean, (In self, Integers dims, bool keepdim, aclDataType, Out out),
         mean_out(out, self, dims, keepdim, out.scalar_type()))
ACLNN(aclnnLogSumExp, (In self, Integers dims, bool keepdim, Out out),
      at::logsumexp_out(out, self, all_if_none(dims, self), keepdim))

ACLNN(aclnnMax, (In self, Out out), out.copy_(at::max(self)))
ACLNN(aclnnMin, (In self, Out out), out.copy_(at::min(self)))
ACLNN_AS(aclnnAmax, (In self, Integers dims, bool keepdim, Out out), amax_out(out, self, dims, keepdim))
ACLNN_AS(aclnnAmin, (In self, Integers dims, bool keepdim, Out out), amin_out(out, self, dims, keepdim))
ACLNN(aclnnMaxDim, (In self, int64_t dim, bool keepdim, Out out, Out indices),
      auto [values, places] = at::max(self, dim, keepdim); out.copy_(values); indices.copy_(places))
ACLNN(aclnnMinDim, (In self, int64_t dim, bool keepdim, Out out, Out indices),
      auto [values, places] = at::min(self, dim, keepdim); out.copy_(values); indices.copy_(places))
ACLNN(aclnnArgMax, (In self, int64_t dim, bool keepdim, Out out), out.copy_(at::argmax(self, dim, keepdim)))
ACLNN(aclnnArgMin, (In self, int64_t dim, bool keepdim, Out out), out.copy_(at::argmin(self, dim, keepdim)))

ACLNN(aclnnAll, (In self, Integers dims, bool keepdim, Out out),
      out.copy_(at::all(self, all_if_none(dims, self), keepdim)))
ACLNN(aclnnAny, (In self, Integers dims, bool keepdim, Out out),
      out.copy_(at::any(self, all_if_none(dims, self), keepdim)))

// The correction as a Scalar: a plain number would be taken for the older switch between two corrections.
static void variance_and_mean(In self, Integers dims, int64_t correction, bool keepdim, Out variance, Out mean) {
  auto [its_variance, its_mean] = at::var_mean(self, all_if_none(dims, self), at::Scalar(correction), keepdim);
  variance.copy_(its_variance);
  mean.copy_(its_mean);
}

ACLNN(aclnnVarCorrection, (In self, Integers dims, int64_t correction, bool keepdim, Out out),
      out.copy_(at::var(self, all_if_none(dims, self), at::Scalar(correction), keepdim)))
ACLNN(aclnnVarMean, (In self, Integers dims, int64_t correction, bool keepdim, Out variance, Out mean),
      variance_and_mean(self, dims, correction, keepdim, variance, mean))
ACLNN(aclnnStd, (In self, Integers dims, int64_t correction, bool keepdim, Out out),
      out.copy_(at::std(self, all_if_none(dims, self), at::Scalar(correction), keepdim)))

// The CPU counts no integers and no narrow floats.
static at::Tensor countable(In self) {
  return self.scalar_type() == at::kFloat ? self : self.to(at::kDouble);
}

ACLNN(aclnnHistc, (In self, int64_t bins, Number min, Number max, Out out),
      out.copy_(at::histc(countable(self), bins, min, max)))

ACLNN_AS(aclnnLinalgVectorNorm, (In self, Number order, Integers dims, bool keepdim, aclDataType, Out out),
         linalg_vector_norm_out(out, self, order, all_if_none(dims, self), keepdim, out.scalar_type()))
ACLNN(aclnnNorm, (In self, Number order, Integers dims, bool keepdim, Out out),
      out.copy_(at::norm(self, order, all_if_none(dims, self), keepdim)))
