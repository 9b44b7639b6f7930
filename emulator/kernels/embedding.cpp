// Elements picked by index, and gradients added back to them.
#include "kernel.h"

#include <ATen/Parallel.h>

#include <algorithm>

extern "C" void omp_set_num_threads(int);  // of the OpenMP that torch brings along

using namespace emulator;

// Of a tensor from which elements are picked, only these are moved; into which some are put or added, only these.
static Work picking(In index, In picked) { return {.nbytes = bytes_of(index) + 2 * bytes_of(picked)}; }
static Work adding(In index, In source) { return {.nbytes = bytes_of(index) + 3 * bytes_of(source)}; }

ACLNN_OF(aclnnEmbedding, (In weight, Index indices, Out out), picking(indices, out),
         out.copy_(at::embedding(weight, indices)))
ACLNN(aclnnEmbeddingDenseBackward,
      (In grad, In indices, int64_t rows, int64_t padding_index, bool scale_by_frequency, Out out),
      out.copy_(at::embedding_dense_backward(grad, indices, rows, padding_index, scale_by_frequency)))

ACLNN_OF_IF(aclnnIndexSelect, (In self, int64_t dim, Index index, Out out), picking(index, out),
            TORCH_CHECK(index.dim() <= 1, "an index must be a vector, not of shape ", index.sizes()),
            out.copy_(at::index_select(self, dim, index)))
ACLNN_OF_IF(aclnnGather, (In self, int64_t dim, Index index, Out out), picking(index, out),
            at::meta::gather_out(out, self, dim, index), out.copy_(at::gather(self, dim, index)))

// Where the result is not the tensor itself, that is copied as well.
static Work scattering(In self, In index, In source, In out) {
  Work work = adding(index, source);
  if (self.data_ptr() != out.data_ptr()) work.nbytes += bytes_of(self) + bytes_of(out);
  return work;
}

static at::Tensor scatter(In self, int64_t dim, In index, In source, int64_t reduction) {
  if (reduction == 0) return at::scatter(self, dim, index, source);
  return at::scatter(self, dim, index, source, reduction == 1 ? "add" : "multiply");
}

ACLNN_OF(aclnnScatter, (In self, int64_t dim, Index index, In source, int64_t reduction, Out out),
         scattering(self, index, source, out), out.copy_(scatter(self, dim, index, source, reduction)))
ACLNN_OF(aclnnInplaceScatter, (Out self, int64_t dim, Index index, In source, int64_t reduction), adding(index, source),
         self.copy_(scatter(self, dim, index, source, reduction)))
ACLNN_OF_IF(aclnnScatterAdd, (In self, int64_t dim, Index index, In source, Out out),
            scattering(self, index, source, out), at::meta::scatter_add_out(out, self, dim, index, source),
            out.copy_(at::scatter_add(self, dim, index, source)))
ACLNN_OF(aclnnIndexAdd, (In self, int64_t dim, Index index, In source, Number alpha, Out out),
         scattering(self, index, source, out), out.copy_(at::index_add(self, dim, index, source, alpha)))

// torch_npu passes an empty tensor for a dimension that is not indexed.
static c10::List<std::optional<at::Tensor>> indices_or_none(Ins indices) {
  c10::List<std::optional<at::Tensor>> result;
  for (const at::Tensor& index : indices) {
    result.push_back(index.numel() > 0 ? std::optional(index) : std::nullopt);
  }
  return result;
}

ACLNN_OF(aclnnIndex, (In self, Ins indices, Out out), Work{.nbytes = 2 * bytes_of(out)},
         if (out.numel() > 0) out.copy_(at::index(self, indices_or_none(indices))))

// As long as it lives, this thread's operators use no other threads.
class OneThread {
 public:
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int before_ = at::get_num_threads();  // the first call of a thread sets the number
};

// Several threads would add up in another order each time.
static void index_put(Out self, Ins indices, In values, bool accumulate) {
  bool any = std::any_of(indices.begin(), indices.end(), [](In index) { return index.numel() > 0; });
  if (!any) return;
  std::optional<OneThread> in_order;
  if (accumulate) in_order.emplace();
  self.index_put_(indices_or_none(indices), values, accumulate);
}

ACLNN_IF(aclnnIndexPutImpl, (Out self, Ins indices, In values, bool accumulate, bool),
         TORCH_CHECK(self.scalar_type() == values.scalar_type(), "values of dtype ", values.scalar_type(),
                     " are put into a tensor of ", self.scalar_type()),
         index_put(self, indices, values, accumulate))
