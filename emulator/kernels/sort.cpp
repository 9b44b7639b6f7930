// Orders and running sums.
#include "kernel.h"

using namespace emulator;

ACLNN(aclnnSort, (In self, bool stable, int64_t dim, bool descending, Out values, Out indices),
      auto [sorted, places] = at::sort(self, stable, dim, descending); values.copy_(sorted);
      indices.copy_(places))
ACLNN(aclnnTopk, (In self, int64_t k, int64_t dim, bool largest, bool sorted, Out values, Out indices),
      auto [best, places] = at::topk(self, k, dim, largest, sorted); values.copy_(best); indices.copy_(places))
ACLNN_AS(aclnnCumsum, (In self, int64_t dim, aclDataType, Out out),
         cumsum_out(out, self, dim, out.scalar_type()))
