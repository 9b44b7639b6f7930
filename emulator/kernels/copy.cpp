// Filling, copying, casting, joining and cutting tensors.
#include "kernel.h"

#include <ATen/WrapDimUtilsMulti.h>

using namespace emulator;

static void check_fits(In source, In self) {
  TORCH_CHECK(at::is_expandable_to(source.sizes(), self.sizes()), "shape ", source.sizes(), " does not broadcast to ",
              self.sizes());
}

ACLNN_IF(aclnnInplaceCopy, (Out self, In source), check_fits(source, self), self.copy_(source))
ACLNN(aclnnCast, (In self, aclDataType, Out out), out.copy_(self))
ACLNN(aclnnComplex, (In real, In imaginary, Out out), out.copy_(at::complex(real, imaginary)))
ACLNN(aclnnPolar, (In length, In angle, Out out), out.copy_(at::polar(length, angle)))

ACLNN(aclnnInplaceZero, (Out self), self.zero_())
ACLNN(aclnnInplaceOne, (Out self), self.fill_(1))
ACLNN(aclnnInplaceFillScalar, (Out self, Number value), self.fill_(value))
ACLNN(aclnnInplaceFillTensor, (Out self, In value), self.fill_(value.reshape({})))
ACLNN(aclnnArange, (Number start, Number end, Number step, Out out), at::arange_out(out, start, end, step))
ACLNN(aclnnEye, (int64_t rows, int64_t columns, Out out), at::eye_out(out, rows, columns))

ACLNN_AS(aclnnCat, (Ins tensors, int64_t dim, Out out), cat_out(out, tensors, dim))
ACLNN(aclnnStack, (Ins tensors, int64_t dim, Out out), at::stack_out(out, tensors, dim))
ACLNN(aclnnRepeat, (In self, Integers repeats, Out out), out.copy_(self.repeat(repeats)))
ACLNN_IF(aclnnFlip, (In self, Integers dims, Out out), at::dim_list_to_bitset(dims, self.dim()),
         out.copy_(self.flip(dims)))
ACLNN(aclnnRoll, (In self, Integers shifts, Integers dims, Out out), out.copy_(self.roll(shifts, dims)))
ACLNN(aclnnConstantPadNd, (In self, Integers pad, Number value, Out out),
      out.copy_(at::constant_pad_nd(self, pad, value)))

ACLNN_AS(aclnnTril, (In self, int64_t diagonal, Out out), tril_out(out, self, diagonal))
ACLNN_AS(aclnnTriu, (In self, int64_t diagonal, Out out), triu_out(out, self, diagonal))
ACLNN(aclnnInplaceTril, (Update self, int64_t diagonal), self.tril_(diagonal))
ACLNN(aclnnInplaceTriu, (Update self, int64_t diagonal), self.triu_(diagonal))

ACLNN(aclnnSWhere, (In condition, In self, In other, Out out), at::where_out(out, condition, self, other))
ACLNN_IF(aclnnInplaceMaskedFillScalar, (Update self, In mask, Number value), check_fits(mask, self),
         self.masked_fill_(mask, value))
ACLNN_IF(aclnnInplaceMaskedFillTensor, (Update self, In mask, In value), check_fits(mask, self),
         self.masked_fill_(mask, value.reshape({})))
