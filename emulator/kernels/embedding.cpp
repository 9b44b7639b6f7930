// Rows picked by index, and gradients added back to them.
#include "kernel.h"

using namespace emulator;

ACLNN(aclnnEmbedding, (In weight, In indices, Out out), out.copy_(at::embedding(weight, indices)))
ACLNN(aclnnEmbeddingDenseBackward,
      (In grad, In indices, int64_t rows, int64_t padding_index, bool scale_by_frequency, Out out),
      out.copy_(at::embedding_dense_backward(grad, indices, rows, padding_index, scale_by_frequency)))

ACLNN(aclnnIndexSelect, (In self, int64_t dim, In index, Out out),
      out.copy_(at::index_select(self, dim, index)))
ACLNN(aclnnGather, (In self, int64_t dim, In index, Out out), out.copy_(at::gather(self, dim, index)))
static at::Tensor scatter(In self, int64_t dim, In index, In source, int64_t reduction) {
  if (reduction == 0) return at::scatter(self, dim, index, source);
  return at::scatter(self, dim, index, source, reduction == 1 ? "add" : "multiply");
}

ACLNN(aclnnScatter, (In self, int64_t dim, In index, In source, int64_t reduction, Out out),
      out.copy_(scatter(self, dim, index, source, reduction)))
ACLNN(aclnnInplaceScatter, (Out self, int64_t dim, In index, In source, int64_t reduction),
      self.copy_(scatter(self, dim, index, source, reduction)))
ACLNN(aclnnScatterAdd, (In self, int64_t dim, In index, In source, Out out),
      out.copy_(at::scatter_add(self, dim, index, source)))
ACLNN(aclnnIndexAdd, (In self, int64_t dim, In index, In source, Number alpha, Out out),
      out.copy_(at::index_add(self, dim, index, source, alpha)))
