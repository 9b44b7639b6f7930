// Larger and smaller images, and the gradients of those.
#include "kernel.h"

using namespace emulator;

// How much larger; torch_npu passes a number that is not positive where the caller gave sizes alone.
static std::optional<double> scale_or_none(double scale) {
  return scale > 0 ? std::optional(scale) : std::nullopt;
}

ACLNN(aclnnUpsampleNearest1d, (In self, Integers size, Out out), out.copy_(at::upsample_nearest1d(self, size)))
ACLNN(aclnnUpsampleNearest1dV2, (In self, Integers size, float scale, Out out),
      out.copy_(at::upsample_nearest1d(self, size, scale_or_none(scale))))
ACLNN(aclnnUpsampleNearest1dBackward, (In grad, Integers size, Integers input_size, double scale, Out out),
      out.copy_(at::upsample_nearest1d_backward(grad, size, input_size, scale_or_none(scale))))

ACLNN(aclnnUpsampleNearest2d, (In self, Integers size, Out out), out.copy_(at::upsample_nearest2d(self, size)))
ACLNN(aclnnUpsampleNearest2dV2, (In self, Integers size, float rows, float columns, Out out),
      out.copy_(at::upsample_nearest2d(self, size, scale_or_none(rows), scale_or_none(columns))))
ACLNN(aclnnUpsampleNearest2dBackward,
      (In grad, Integers size, Integers input_size, double rows, double columns, Out out),
      out.copy_(at::upsample_nearest2d_backward(grad, size, input_size, scale_or_none(rows),
                                                scale_or_none(columns))))

ACLNN(aclnnUpsampleBilinear2d,
      (In self, Integers size, bool align_corners, double rows, double columns, Out out),
      out.copy_(at::upsample_bilinear2d(self, size, align_corners, scale_or_none(rows), scale_or_none(columns))))

static void bilinear_backward(In grad, Integers size, Integers input_size, bool align_corners, double rows,
                              double columns, Out out) {
  out.copy_(at::upsample_bilinear2d_backward(grad, size, input_size, align_corners, scale_or_none(rows),
                                             scale_or_none(columns)));
}

ACLNN(aclnnUpsampleBilinear2dBackward,
      (In grad, Integers size, Integers input_size, bool align_corners, double rows, double columns, Out out),
      bilinear_backward(grad, size, input_size, align_corners, rows, columns, out))
ACLNN(aclnnUpsampleBilinear2dBackwardV2,
      (In grad, Integers size, Integers input_size, bool align_corners, double rows, double columns, Out out),
      bilinear_backward(grad, size, input_size, align_corners, rows, columns, out))
