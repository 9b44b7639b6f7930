// Matrix products. The trailing int8_t, by which CANN may trade precision for speed, is ignored.
#include "kernel.h"

using namespace emulator;

// The output may be wider than the factors, which then must not be rounded to their width on the way.
static at::Tensor as(In out, In factor) { return factor.to(out.scalar_type()); }

ACLNN_OF_IF(aclnnMm, (In self, In mat2, Out out, int8_t), product(self, mat2), at::meta::mm(self, mat2),
            out.copy_(at::mm(as(out, self), as(out, mat2))))
ACLNN(aclnnMv, (In self, In vector, Out out, int8_t), out.copy_(at::mv(self, vector)))
ACLNN(aclnnDot, (In self, In other, Out out), out.copy_(at::dot(self, other)))
ACLNN_OF_IF(aclnnBatchMatMul, (In self, In mat2, Out out, int8_t), product(self, mat2), at::meta::bmm(self, mat2),
            out.copy_(at::bmm(as(out, self), as(out, mat2))))
ACLNN_OF(aclnnMatmul, (In self, In mat2, Out out, int8_t), product(self, mat2),
         out.copy_(at::matmul(self, mat2)))

ACLNN_OF_IF(aclnnAddmm, (In self, In mat1, In mat2, Number beta, Number alpha, Out out, int8_t),
            product(mat1, mat2), at::meta::addmm(self, mat1, mat2, beta, alpha),
            out.copy_(at::addmm(as(out, self), as(out, mat1), as(out, mat2), beta, alpha)))
ACLNN_OF_IF(aclnnInplaceAddmm, (Update self, In mat1, In mat2, Number beta, Number alpha, int8_t),
            product(mat1, mat2), at::meta::addmm_(self, mat1, mat2, beta, alpha), self.addmm_(mat1, mat2, beta, alpha))
ACLNN_OF_IF(aclnnBaddbmm, (In self, In batch1, In batch2, Number beta, Number alpha, Out out, int8_t),
            product(batch1, batch2), at::meta::baddbmm(self, batch1, batch2, beta, alpha),
            out.copy_(at::baddbmm(as(out, self), as(out, batch1), as(out, batch2), beta, alpha)))
ACLNN_OF_IF(aclnnInplaceBaddbmm, (Update self, In batch1, In batch2, Number beta, Number alpha, int8_t),
            product(batch1, batch2), at::meta::baddbmm_(self, batch1, batch2, beta, alpha),
            self.baddbmm_(batch1, batch2, beta, alpha))
