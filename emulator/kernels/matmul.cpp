// Matrix products. The trailing int8_t, by which CANN may trade precision for speed, is ignored. Narrow factors are
// multiplied as float32, in which hardware adds up, too: a CPU without instructions for bfloat16 takes up to fifty
// times as long for those, and what they add up to depends on the CPU.
#include "kernel.h"

using namespace emulator;

// The output may be wider than the factors, which then must not be rounded to their width on the way.
static at::Tensor as(In out, In factor) { return wide(factor.to(out.scalar_type())); }

// torch_npu hands over what it was given, and leaves it to CANN to refuse it.
static void check_product(In self, In mat2) {
  TORCH_CHECK(self.dim() > 0 && mat2.dim() > 0, "both factors must have a dimension");
  TORCH_CHECK(self.size(-1) == mat2.size(mat2.dim() == 1 ? 0 : -2), "shapes ", self.sizes(), " and ", mat2.sizes(),
              " cannot be multiplied");
  TORCH_CHECK(self.scalar_type() == mat2.scalar_type(), "factors must have one dtype, not ", self.scalar_type(),
              " and ", mat2.scalar_type());
  if (self.dim() > 2 && mat2.dim() > 2) {
    at::infer_size(self.sizes().slice(0, self.dim() - 2), mat2.sizes().slice(0, mat2.dim() - 2));
  }
}

ACLNN_OF_IF(aclnnMm, (In self, In mat2, Out out, int8_t), product(self, mat2), at::meta::mm(self, mat2),
            out.copy_(at::mm(as(out, self), as(out, mat2))))
ACLNN_IF(aclnnMv, (In self, In vector, Out out, int8_t), check_product(self, vector),
         out.copy_(at::mv(wide(self), wide(vector))))
ACLNN_IF(aclnnDot, (In self, In other, Out out), check_product(self, other),
         out.copy_(at::dot(wide(self), wide(other))))
ACLNN_OF_IF(aclnnBatchMatMul, (In self, In mat2, Out out, int8_t), product(self, mat2), at::meta::bmm(self, mat2),
            out.copy_(at::bmm(as(out, self), as(out, mat2))))
ACLNN_OF_IF(aclnnMatmul, (In self, In mat2, Out out, int8_t), product(self, mat2), check_product(self, mat2),
            out.copy_(at::matmul(wide(self), wide(mat2))))

ACLNN_OF_IF(aclnnAddmm, (In self, In mat1, In mat2, Number beta, Number alpha, Out out, int8_t),
            product(mat1, mat2), at::meta::addmm(self, mat1, mat2, beta, alpha),
            out.copy_(at::addmm(as(out, self), as(out, mat1), as(out, mat2), beta, alpha)))
ACLNN_OF_IF(aclnnInplaceAddmm, (Update self, In mat1, In mat2, Number beta, Number alpha, int8_t),
            product(mat1, mat2), at::meta::addmm_(self, mat1, mat2, beta, alpha),
            self.copy_(at::addmm(wide(self), wide(mat1), wide(mat2), beta, alpha)))
ACLNN_OF_IF(aclnnBaddbmm, (In self, In batch1, In batch2, Number beta, Number alpha, Out out, int8_t),
            product(batch1, batch2), at::meta::baddbmm(self, batch1, batch2, beta, alpha),
            out.copy_(at::baddbmm(as(out, self), as(out, batch1), as(out, batch2), beta, alpha)))
ACLNN_OF_IF(aclnnInplaceBaddbmm, (Update self, In batch1, In batch2, Number beta, Number alpha, int8_t),
            product(batch1, batch2), at::meta::baddbmm_(self, batch1, batch2, beta, alpha),
            self.copy_(at::baddbmm(wide(self), wide(batch1), wide(batch2), beta, alpha)))
